"""`elarge plan`: memory and time of a run file, without its hardware.

`estimate` computes a plan without jax. A child process reads the shapes of the parameters from the
model class. `compiled` compares the estimate with a program that a child process compiles on
simulated devices.
"""
