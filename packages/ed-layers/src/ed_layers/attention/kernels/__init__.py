"""Implementations of attention, one file each, and the code that they share."""
