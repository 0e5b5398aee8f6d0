"""Models beside the learner: frozen ones, and a value head."""
