"""The option of noise on embeddings, for the methods that learn from given texts. Free of jax."""

from __future__ import annotations

from ed_infra.options import Positive

from ed_trainers.options.base import TrainingArguments


class NoiseArguments(TrainingArguments):
    """NEFTune (Jain et al., arXiv:2310.05914)."""

    neftune_noise_alpha: Positive | None = None
    """Size of NEFTune's noise on the embeddings: uniform, up to this over the root of a document's
    tokens times the hidden size; in training only."""
