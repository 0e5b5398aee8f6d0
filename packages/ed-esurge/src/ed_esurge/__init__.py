"""A serving engine for JAX language models: continuous batching, paged cache, OpenAI-compatible server."""
