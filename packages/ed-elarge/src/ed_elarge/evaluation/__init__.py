"""Evaluation of a model on benchmarks and on held-out text."""
