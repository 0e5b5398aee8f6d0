"""Tokens of documents: on disk, in memory, or encoded on demand."""
