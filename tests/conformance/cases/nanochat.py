"""Tiny configurations of nanochat."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "soft cap": {"final_logit_softcapping": 3.0},
        "no cap, biases, tied": {
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
