"""Tiny configurations of kimi_k25."""

from ed_models.conformance import Cases

TEXT = {
    "model_type": "deepseek_v3",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "patch_size": 4,
    "pos_emb_height": 5,
    "pos_emb_width": 5,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
TOKENS = {
    "image_token_id": 159,
    "video_token_id": 160,
    "eos_token_id": 2,
    "projection_hidden_size": 24,
}

CASES = Cases(
    {
        "images of different sizes": {
            "text_config": TEXT,
            "vision_config": VISION,
            "tie_word_embeddings": False,
            **TOKENS,
        },
        # transformers 5.23 cannot save a model whose queries are not compressed.
        "halves turn, fewer positions, tied": {
            "text_config": {**TEXT, "rope_interleave": False, "tie_word_embeddings": True},
            "vision_config": {**VISION, "pos_emb_height": 3, "pos_emb_width": 3},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
