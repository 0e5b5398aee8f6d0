"""Layers with a state of fixed size: shared code (`rows`, `conv`), and the recurrences."""
