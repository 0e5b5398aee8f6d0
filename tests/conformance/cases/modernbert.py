"""Conformance cases of ModernBERT."""

from ed_models.conformance import ENCODER_TASKS, TINY_ENCODER, Cases

_TINY = {
    **TINY_ENCODER,
    "local_attention": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}

CASES = Cases(
    {
        "local attention": _TINY,
        "biases, mean of the tokens": {
            **_TINY,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "classifier_pooling": "mean",
        },
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
