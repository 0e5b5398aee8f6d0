"""Shared code of the methods that train on sampled completions."""
