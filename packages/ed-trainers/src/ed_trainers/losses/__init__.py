"""What losses are made of: pairs, segments, chunked log-probabilities and divergences."""
