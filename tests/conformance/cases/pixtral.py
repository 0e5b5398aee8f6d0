"""Tiny configurations of the vision tower pixtral."""

from ed_models.conformance import Cases

VISION = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
}

CASES = Cases(
    {
        "images of one size": {name: x for name, x in VISION.items() if name != "model_type"},
        "SiLU, another base": {
            **{name: x for name, x in VISION.items() if name != "model_type"},
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
    },
    tiny=False,
)
