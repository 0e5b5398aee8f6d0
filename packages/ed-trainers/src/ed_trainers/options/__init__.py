"""The options of the methods, beside the methods and free of jax."""
