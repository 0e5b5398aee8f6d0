"""Checks across keys and sections, of the machine, and of keys without effect."""
