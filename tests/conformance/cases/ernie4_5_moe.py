"""Tiny configurations of ernie4_5_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "shared experts": {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 4,
        },
        "every second layer, biases": {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 0,
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "use_bias": True,
        },
    }
)
