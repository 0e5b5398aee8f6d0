"""`elarge plan`: memory and time of a run file, without its hardware.

`estimate` computes a plan without jax. `compiled` compares the estimate with a program that a child
process compiles on simulated devices.
"""
