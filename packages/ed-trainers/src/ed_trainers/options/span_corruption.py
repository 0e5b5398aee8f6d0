"""Options of `span_corruption`. Free of jax."""

from __future__ import annotations

from typing import Annotated, Literal

from ed_infra.options import Count, Positive
from pydantic import Field

from ed_trainers.options.next_token import NextTokenArguments

__all__ = ["SpanCorruptionArguments"]


class SpanCorruptionArguments(NextTokenArguments):
    """Pre-training of encoder-decoders as T5 (Raffel et al., arXiv:1910.10683): spans of tokens are
    replaced by sentinels, and the decoder predicts the spans."""

    DEFAULT_LENGTH = 512
    trainer_type: Literal["span_corruption"] = "span_corruption"
    learning_rate: Positive = 1e-4
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens of a document that spans replace."""
    mean_noise_span_length: Annotated[float, Field(ge=1, le=10_000)] = 3.0
    """Mean number of tokens of a span."""
    max_target_length: Count | None = None
    """Number of decoder positions of a row. A document whose spans do not fit stays unchanged and
    has no loss. None: twice the positions that one document with the length of a row needs."""
