"""The engine's device side: static shapes, one jitted step, the sampler."""
