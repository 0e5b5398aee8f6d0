"""Conformance cases of SigLIP's vision tower."""

from ed_models.conformance import Cases

from tests.conformance.cases.clip_vision_model import TINY

CASES = Cases({"base": TINY, "no pooling": {**TINY, "vision_use_head": False}}, tiny=False)
