"""The option of noise on embeddings, for methods that train on given texts. Free of jax."""

from __future__ import annotations

from ed_infra.options import Positive

from ed_trainers.options.base import TrainingArguments


class NoiseArguments(TrainingArguments):
    """NEFTune (Jain et al., arXiv:2310.05914)."""

    neftune_noise_alpha: Positive | None = None
    """Magnitude of NEFTune's uniform noise on the embeddings: at most this value divided by the
    root of (tokens of the document times hidden size), in training only."""
