"""The umbrella."""
