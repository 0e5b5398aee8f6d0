"""Tiny configurations of voxtral."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT

#: Two encoder positions become one feature.
AUDIO = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_mel_bins": 6,
    "max_source_positions": 8,
}
TOKENS = {"audio_token_id": 159, "eos_token_id": 2}

CASES = Cases(
    {
        "two positions become a feature": {
            "text_config": {**TEXT, "head_dim": 8},
            "audio_config": AUDIO,
            **TOKENS,
        },
        "one layer, other activation, tied": {
            "text_config": {**TEXT, "head_dim": 8},
            "audio_config": {**AUDIO, "num_hidden_layers": 1, "num_mel_bins": 4},
            "projector_hidden_act": "silu",
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
