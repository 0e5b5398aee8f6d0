"""Tiny configurations of hunyuan_v1_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {"head_dim": 12, "num_experts": 8, "moe_topk": 3},
        "biases, tied": {
            "head_dim": 8,
            "num_experts": 6,
            "moe_topk": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
