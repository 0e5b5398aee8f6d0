"""Low-rank adapters of linear layers: one that trains, or several that are served."""
