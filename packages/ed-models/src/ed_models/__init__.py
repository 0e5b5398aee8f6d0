"""Model families in Flax NNX that load and save Hugging Face checkpoints and match them numerically."""
