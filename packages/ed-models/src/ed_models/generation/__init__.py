"""`generate`: options, prompts, the compiled loops, and the processors of logits."""
