"""Conformance cases of DINOv3."""

from ed_models.conformance import Cases

from tests.conformance.cases.clip_vision_model import TINY

CASES = Cases(
    {
        "base": {**TINY, "num_register_tokens": 2},
        "gated, no registers, wide images": {
            **TINY,
            "image_size": [12, 20],
            "use_gated_mlp": True,
            "hidden_act": "silu",
            "key_bias": True,
            "value_bias": False,
            "mlp_bias": False,
            "proj_bias": False,
        },
    },
    tiny=False,
)
