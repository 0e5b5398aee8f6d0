"""The engine's host side: requests, pages, prefix cache, scheduler. Plain Python, no jax.

Everything here is deterministic: the same requests in the same order give the same `StepPlan`s,
so that several processes can each compute them.
"""
