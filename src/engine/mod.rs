//! The LLM in this process: layers resident or streamed, a KV capacity that shrinks and grows.
