"""Conformance cases of ViT."""

from ed_infra.enums import TaskType
from ed_models.conformance import Cases

from tests.conformance.cases.clip_vision_model import TINY

TASKS = (TaskType.IMAGE_CLASSIFICATION, TaskType.BASE_VISION)

CASES = Cases(
    {
        "base": TINY,
        "wide images, no bias of queries": {
            **TINY,
            "image_size": [12, 20],
            "qkv_bias": False,
            "pooler_output_size": 24,
            "pooler_act": "gelu",
        },
    },
    tiny=False,
    tasks=TASKS,
)
