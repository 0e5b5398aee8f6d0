"""Execution of the actions of a run file, and the summary of a run."""
