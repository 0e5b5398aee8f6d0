"""Tiny configurations of vaultgemma."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
