"""Tiny configurations of exaone_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "windows, groups": {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
        },
        "one window, two dense layers": {
            "head_dim": 12,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    }
)
