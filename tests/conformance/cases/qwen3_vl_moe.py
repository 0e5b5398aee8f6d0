"""Tiny configurations of qwen3_vl_moe."""

from ed_models.conformance import Cases

TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
}
TOKENS = {
    "image_token_id": 156,
    "video_token_id": 157,
    "vision_start_token_id": 158,
    "vision_end_token_id": 159,
    "eos_token_id": 2,
}

CASES = Cases(
    {
        "features of several layers": {
            "text_config": TEXT,
            "vision_config": VISION,
            "tie_word_embeddings": False,
            **TOKENS,
        },
        "every second layer, biases, tied": {
            "text_config": {
                **TEXT,
                "attention_bias": True,
                "decoder_sparse_step": 2,
                "num_hidden_layers": 4,
            },
            "vision_config": {**VISION, "deepstack_visual_indexes": [2]},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
