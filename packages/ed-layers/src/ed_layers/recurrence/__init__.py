"""Layers with a state of fixed size: what they share (`rows`, `conv`), and each recurrence."""
