"""Tiny configurations of gemma4_text."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "shared keys, inputs of layers": {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "head_dim": 8,
            "rms_norm_eps": 0.1,
            "global_head_dim": 16,
            "sliding_window": 6,
            "vocab_size_per_layer_input": 160,
            "hidden_size_per_layer_input": 8,
            "tie_word_embeddings": True,
        },
        "experts, values that are keys": {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 7,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 16,
            "rms_norm_eps": 0.1,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    },
    # torch's float32 gradient of the embedding differs from its float64 gradient by 2e-4.
    gradients=5e-4,
)
