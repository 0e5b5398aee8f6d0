"""Scripts behind every figure in the docs: `python -m tools.bench.<name>`."""
