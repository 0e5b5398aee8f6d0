"""Checks that a model directory is the model that was trained.

One file contains the checks of one subject. A check is a function of a `Subject` that returns an
`Outcome`. `receipt` runs all checks and writes the certificate.
"""
