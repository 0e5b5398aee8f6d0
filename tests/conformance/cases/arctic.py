"""Tiny configurations of arctic."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "experts beside a dense layer": {
            "moe_layer_frequency": 1,
            "parallel_attn_mlp_res": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
        "every second layer has experts, windows": {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "sliding_window": 6,
            "tie_word_embeddings": True,
        },
    }
)
