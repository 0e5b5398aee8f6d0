"""Runs on several hosts: one file per launcher, and one entry in `launchers`."""
