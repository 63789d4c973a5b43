//! OpenAI-compatible doors, metrics, and one page.
