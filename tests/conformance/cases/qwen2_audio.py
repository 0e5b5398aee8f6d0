"""Tiny configurations of qwen2_audio."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT

QWEN2 = {**TEXT, "model_type": "qwen2"}
#: Two encoder positions become one feature.
AUDIO = {
    "d_model": 24,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "num_mel_bins": 6,
    "max_source_positions": 8,
}
TOKENS = {"audio_token_index": 159, "eos_token_id": 2}

CASES = Cases(
    {
        "recordings of different lengths": {
            "text_config": QWEN2,
            "audio_config": AUDIO,
            **TOKENS,
        },
        "one layer, other activation, tied": {
            "text_config": {**QWEN2, "tie_word_embeddings": True},
            "audio_config": {
                **AUDIO,
                "encoder_layers": 1,
                "num_mel_bins": 4,
                "activation_function": "relu",
            },
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
