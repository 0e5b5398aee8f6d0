"""The engine's host side: requests, pages, prefix cache, scheduler. Plain Python, no jax.

This package is deterministic: the same requests in the same order produce the same `StepPlan`s, so
that several processes can compute the plans independently.
"""
