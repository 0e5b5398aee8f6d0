"""Conformance cases of SigLIP 2."""

from ed_infra.enums import TaskType
from ed_models.conformance import Cases

from tests.conformance.cases.clip import TEXT
from tests.conformance.cases.siglip2_vision_model import TINY

CASES = Cases(
    {
        "base": {
            "text_config": {**TEXT, "hidden_size": 32, "projection_size": 32},
            "vision_config": TINY,
        },
        "projected texts": {
            "text_config": {**TEXT, "projection_size": 32},
            "vision_config": TINY,
        },
    },
    tiny=False,
    tasks=(TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION, TaskType.IMAGE_CLASSIFICATION),
)
