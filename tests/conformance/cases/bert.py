"""Conformance cases of BERT."""

from ed_models.conformance import ENCODER_TASKS, TINY_ENCODER, Cases

CASES = Cases(
    {
        "encoder": TINY_ENCODER,
        "separate head, ReLU, one token type": {
            **TINY_ENCODER,
            "tie_word_embeddings": False,
            "hidden_act": "relu",
            "type_vocab_size": 1,
        },
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
