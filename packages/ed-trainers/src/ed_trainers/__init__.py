"""Trainers for language models on JAX: exact resume, exact accumulation, fused losses."""
