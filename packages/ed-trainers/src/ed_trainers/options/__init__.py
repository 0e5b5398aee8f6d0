"""The options of the methods, without jax."""
