"""Pictures of clients: decoding in limited child processes."""
