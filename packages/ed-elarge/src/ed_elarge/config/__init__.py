"""Reading and checking run files. Nothing here imports jax or transformers."""
