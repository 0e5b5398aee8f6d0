"""Tiny configurations of gemma2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "windows, soft caps": {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        "no soft caps, biases": {
            "head_dim": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
