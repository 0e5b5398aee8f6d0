"""Conformance cases of NomicBERT."""

from ed_infra.enums import TaskType
from ed_models.conformance import TINY_ENCODER, Cases

CASES = Cases(
    {"encoder": {**TINY_ENCODER, "head_dim": 8}},
    tasks=(
        *(TaskType.MASKED_LM, TaskType.BASE_MODULE),
        *(TaskType.SEQUENCE_CLASSIFICATION, TaskType.TOKEN_CLASSIFICATION),
    ),
    tiny=False,
)
