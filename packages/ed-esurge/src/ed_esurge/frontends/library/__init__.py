"""Models that are loaded on demand, and models that clients derive from others."""
