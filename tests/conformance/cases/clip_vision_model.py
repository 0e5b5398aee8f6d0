"""Conformance cases of CLIP's vision tower."""

from ed_models.conformance import Cases

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}

CASES = Cases(
    {"base": TINY, "gelu, one channel": {**TINY, "hidden_act": "gelu", "num_channels": 1}},
    tiny=False,
)
