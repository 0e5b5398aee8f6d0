"""Conformance cases of Whisper."""

from ed_models.conformance import TINY_BART, Cases

_TINY = {
    **{name: value for name, value in TINY_BART.items() if name != "max_position_embeddings"},
    "num_mel_bins": 20,
    "max_source_positions": 30,
    "max_target_positions": 64,
}

CASES = Cases(
    {
        "large": _TINY,
        "separate head, ReLU": {
            **_TINY,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "encoder_attention_heads": 2,
        },
        "turbo: fewer layers of the decoder": {**_TINY, "decoder_layers": 1},
    },
    tiny=False,
)
