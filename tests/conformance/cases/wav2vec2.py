"""Conformance cases of Wav2Vec2."""

from ed_models.conformance import Cases

_TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": [16, 16, 24],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 4, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

CASES = Cases(
    {
        "base": _TINY,
        "large, norms of every convolution": {
            **_TINY,
            "feat_extract_norm": "layer",
            "conv_bias": True,
            "do_stable_layer_norm": True,
            "num_conv_pos_embeddings": 15,
        },
        "MMS: an adapter in each layer": {
            **_TINY,
            "feat_extract_norm": "layer",
            "do_stable_layer_norm": True,
            "adapter_attn_dim": 8,
        },
        "an adapter after the layers": {
            **_TINY,
            "add_adapter": True,
            "num_adapter_layers": 2,
            "output_hidden_size": 24,
            "feat_extract_activation": "gelu_python",
        },
    },
    tiny=False,
)
