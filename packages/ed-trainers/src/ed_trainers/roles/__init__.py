"""Models in addition to the learner: frozen models, and a value head."""
