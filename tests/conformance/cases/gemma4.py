"""Tiny configurations of gemma4."""

from ed_models.conformance import Cases

TEXT = {
    "model_type": "gemma4_text",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "rms_norm_eps": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
TOKENS = {"image_token_id": 159, "video_token_id": 161, "audio_token_id": 162, "eos_token_id": 2}

CASES = Cases(
    {
        "shared keys, inputs of layers, clipped tower": {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 6,
                "layer_types": TEXT["layer_types"] * 2,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "vocab_size_per_layer_input": 160,
                "hidden_size_per_layer_input": 8,
            },
            "vision_config": {**VISION, "use_clipped_linears": True},
            **TOKENS,
        },
        "images in both directions, experts": {
            "text_config": {
                **TEXT,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 3,
                "moe_intermediate_size": 16,
                "final_logit_softcapping": 3.0,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {**VISION, "standardize": True, "pooling_kernel_size": 3},
            **TOKENS,
        },
    },
    ours=4e-5,  # scores have no scale
    tiny=False,
)
