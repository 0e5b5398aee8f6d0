"""Batches: arrays, loaders, prompts."""
