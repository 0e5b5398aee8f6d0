"""Conformance cases of DINOv2 with registers."""

from ed_models.conformance import Cases

from tests.conformance.cases.vit import TASKS, TINY

CASES = Cases(
    {"base": {**TINY, "mlp_ratio": 2, "patch_size": 4, "num_register_tokens": 3}},
    tiny=False,
    tasks=TASKS,
)
