"""Grammars of structured outputs: limits, trials in child processes, and the compiled grammars."""
