"""Tiny configurations of qwen3_vl_text."""

from ed_models.conformance import Cases

ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}

CASES = Cases({"biases": {"head_dim": 8, "attention_bias": True, "rope_parameters": ROPE}})
