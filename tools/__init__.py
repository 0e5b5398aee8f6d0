"""Tools of the workspace: run as `uv run python -m tools.NAME` from the root. Not published."""
