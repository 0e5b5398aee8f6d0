"""Tiny configurations of mellum."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {
            "head_dim": 12,
            "sliding_window": 6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "num_mtp_layers": 0,
            "num_hidden_layers": 4,
        },
        "biases, norms, tied": {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_mtp_layers": 0,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    }
)
