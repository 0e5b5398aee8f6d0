"""Slices of the nightly tests, and the last result of each nightly test."""
