"""Matrices of a model: linear layers, experts, embeddings, heads, and their products."""
