"""What the methods that learn from completions of their own share; `ed_trainers.methods` are they."""
