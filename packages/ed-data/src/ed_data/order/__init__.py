"""Which documents form the rows of each batch: mixing, shuffling, packing, streaming."""
