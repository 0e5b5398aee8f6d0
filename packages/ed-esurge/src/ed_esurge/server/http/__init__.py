"""Reading requests and writing answers: limits, keys, bodies, errors and streams."""
