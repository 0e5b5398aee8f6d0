"""Checkpoints of training: written whole or not at all, verified, kept, found again."""
