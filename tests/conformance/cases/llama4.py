"""Tiny configurations of llama4."""

from ed_models.conformance import Cases

TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "attention_chunk_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_layers": [1, 3],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "vision_output_dim": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

CASES = Cases(
    {
        "four patches of a feature": {
            "text_config": TEXT,
            "vision_config": VISION,
            "image_token_index": 159,
            "eos_token_id": 2,
        },
    },
    tiny=False,
)
