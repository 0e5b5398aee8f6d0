"""Conformance cases of the text tower of SigLIP."""

from ed_models.conformance import Cases

from tests.conformance.cases.clip import TEXT

CASES = Cases({"base": TEXT}, tiny=False)
