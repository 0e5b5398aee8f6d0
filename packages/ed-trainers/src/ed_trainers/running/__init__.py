"""The loop of a training run, its evaluations, and the reasons to end it."""
