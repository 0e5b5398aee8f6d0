"""What the methods share that learn from completions of their own."""
