"""Tiny configurations of youtu."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
            "pad_token_id": None,  # transformers 5.23 loads zeros for the embedding of this token
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
