"""GGUF files of llama.cpp: read as Hugging Face checkpoints, and written from them."""
