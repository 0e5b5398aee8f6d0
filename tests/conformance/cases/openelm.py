"""Tiny configurations of openelm."""

from ed_models.conformance import Cases

_NAMES = {
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
    "tie_word_embeddings": None,
    "model_dim": 32,
    "max_context_length": 128,
    "head_dim": 8,
    "ffn_dim_divisor": 16,
}

CASES = Cases(
    {
        "more heads in deeper layers, tied": {
            **_NAMES,
            "num_transformer_layers": 4,
            "num_query_heads": [4, 4, 6, 8],
            "num_kv_heads": [2, 2, 2, 4],
            "ffn_multipliers": [0.5, 0.5, 1.6, 2.0],
            "normalize_qk_projections": True,
            "share_input_output_layers": True,
        },
        "plain queries and keys": {
            **_NAMES,
            "num_transformer_layers": 2,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 4],
            "ffn_multipliers": [1.0, 1.5],
            "rope_freq_constant": 1000,
        },
    }
)
