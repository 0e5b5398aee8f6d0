"""Attention, caches, norms, rotary embeddings, scanned depth, remat and losses for JAX language models."""
