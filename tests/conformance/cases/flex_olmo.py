"""Tiny configurations of flex_olmo."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, norms, tied": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    }
)
