"""Tiny configurations of youtu."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
        },
        "biases, tied": {
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
