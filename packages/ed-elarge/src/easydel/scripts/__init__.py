"""Programs that run with `python -m`."""
