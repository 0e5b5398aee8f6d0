"""Tiny configurations of cohere."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "query and key norms": {"use_qk_norm": True, "tie_word_embeddings": True},
        "biases": {"attention_bias": True, "logit_scale": 0.5, "tie_word_embeddings": True},
    }
)
