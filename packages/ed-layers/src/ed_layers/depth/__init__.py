"""The layers of a model: scanned or unrolled, and rematerialized."""
