"""Low-rank adapters: layers, values, names, and PEFT's files."""
