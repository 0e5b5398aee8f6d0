"""Rotary position embeddings: parameters, frequencies and the rotation."""
