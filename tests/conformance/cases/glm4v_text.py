"""Tiny configurations of glm4v_text."""

from ed_models.conformance import Cases

ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}

CASES = Cases({"base": {"rope_parameters": ROPE}})
