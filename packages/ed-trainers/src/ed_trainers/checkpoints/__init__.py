"""Checkpoints of training: atomic, verified, and complete."""
