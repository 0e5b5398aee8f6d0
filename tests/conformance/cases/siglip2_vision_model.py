"""Conformance cases of SigLIP 2's vision tower."""

from ed_models.conformance import Cases

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_patches": 16,
    "patch_size": 4,
}

CASES = Cases({"base": TINY, "no pooling": {**TINY, "vision_use_head": False}}, tiny=False)
