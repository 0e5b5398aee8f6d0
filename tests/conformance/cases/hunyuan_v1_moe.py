"""Tiny configurations of hunyuan_v1_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "other numbers of experts, stretched positions, tied": {
            "head_dim": 12,
            "num_experts": 6,
            "moe_topk": [1, 3, 2],
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 50.0,
            },
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
