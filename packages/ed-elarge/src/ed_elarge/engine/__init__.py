"""The serving engine with the weights of a training run."""
