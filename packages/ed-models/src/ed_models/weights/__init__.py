"""Parameters of models in Hugging Face checkpoints: rules and blocks."""
