//! gRPC for tenants, operators and LLM clients.
