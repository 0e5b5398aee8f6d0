"""Conformance cases of CLIP."""

from ed_infra.enums import TaskType
from ed_models.conformance import Cases

from tests.conformance.cases.clip_vision_model import TINY

TEXT = {
    "vocab_size": 160,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 159,
}

CASES = Cases(
    {
        "base": {"text_config": TEXT, "vision_config": TINY, "projection_dim": 20},
        "end token of the first checkpoints": {
            "text_config": {**TEXT, "eos_token_id": 2, "hidden_act": "gelu"},
            "vision_config": TINY,
            "projection_dim": 20,
        },
    },
    tiny=False,
    tasks=(TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION, TaskType.IMAGE_CLASSIFICATION),
)
