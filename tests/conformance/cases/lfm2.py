"""Tiny configurations of lfm2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "adjusted size": {
            "num_hidden_layers": 4,
            "full_attn_idxs": [2],
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.2,
        },
        "four taps, tied": {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    }
)
