"""Runs that replay a part of a finished run: without some rows, or with other values."""
