"""Layouts of packed tensors in Hugging Face checkpoints, one family of layouts in a file."""
