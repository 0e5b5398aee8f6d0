"""Tiny configurations of kolibri1."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "norms, tied": {
            "intermediate_size": None,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        }
    }
)
