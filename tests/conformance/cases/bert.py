"""Conformance cases of BERT."""

from ed_infra.enums import TaskType
from ed_models.conformance import Cases

CASES = Cases(
    {
        "encoder": {
            "vocab_size": 160,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    },
    task=TaskType.BASE_MODULE,
    tiny=False,
)
