"""Tiny configurations of cohere2_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "windows, averaged": {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 6,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        "dense first, sigmoid, rms": {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 40,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
        },
    }
)
