"""Parts of losses: pairs, segments, chunked log-probabilities and divergences."""
