"""Figures of the source code that tests hold: sizes, types, names, and files of a task."""
