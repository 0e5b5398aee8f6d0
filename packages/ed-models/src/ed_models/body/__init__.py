"""Bodies of decoders: embedding, layers, norm, and the context of a forward pass."""
