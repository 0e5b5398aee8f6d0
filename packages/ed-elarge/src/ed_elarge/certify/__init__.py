"""Checks that a model directory is the model that was trained.

One file contains the checks of one topic. A check is a function of a `CertifiedModel` that returns
an `Outcome`. `receipt` runs all checks and writes the certificate.
"""
