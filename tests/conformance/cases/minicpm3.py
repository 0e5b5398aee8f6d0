"""Tiny configurations of minicpm3."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "head_dim": 8,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "scale_emb": 1.9,
            "scale_depth": 0.9,
            "dim_model_base": 24,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        }
    }
)
