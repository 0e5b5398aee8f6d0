"""Deterministic, resumable text data for language models: sources, tokenization, packing, mixtures."""
