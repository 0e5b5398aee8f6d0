"""Checkpoints of Hugging Face: looked up, checked, read into shards, written."""
