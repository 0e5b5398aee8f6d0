"""Conformance cases of DistilBERT."""

from ed_models.conformance import ENCODER_TASKS, Cases

CASES = Cases(
    {
        "encoder": {
            "vocab_size": 160,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 3,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
