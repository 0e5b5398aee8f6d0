"""Metrics of a run, their destinations, and the progress bar."""
