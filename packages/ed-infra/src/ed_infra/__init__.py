"""Configuration, device meshes, sharding, registry, rope and mask maths for JAX language models."""
