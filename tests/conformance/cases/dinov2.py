"""Conformance cases of DINOv2."""

from ed_models.conformance import Cases

from tests.conformance.cases.vit import TASKS, TINY

CASES = Cases(
    {
        "base": {**TINY, "mlp_ratio": 2},
        "gated, no mask token": {
            **TINY,
            "mlp_ratio": 2,
            "use_swiglu_ffn": True,
            "use_mask_token": False,
        },
    },
    tiny=False,
    tasks=TASKS,
)
