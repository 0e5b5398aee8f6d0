"""Options of `mlm`. Free of jax."""

from __future__ import annotations

from typing import Annotated, Literal

from ed_infra.options import Fraction
from pydantic import Field, ValidationInfo, field_validator

from ed_trainers.options.base import StrictFlag, conflict
from ed_trainers.options.next_token import NextTokenArguments


class MLMArguments(NextTokenArguments):
    """Masked language modeling (Devlin et al., arXiv:1810.04805): predict masked tokens."""

    trainer_type: Literal["mlm"] = "mlm"
    mlm_probability: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Probability that a token, or a whole word, is selected for prediction."""
    mask_replace_prob: Fraction = 0.8
    """Share of the selected tokens that the mask token replaces."""
    random_replace_prob: Fraction = 0.1
    """Share of the selected tokens that random tokens replace; the others stay unchanged."""
    whole_word_mask: StrictFlag = False
    """Select whole words instead of tokens. A word begins at a token without the prefix `##`
    (WordPiece), or with a space (byte-level and SentencePiece tokenizers)."""

    @field_validator("random_replace_prob")
    @classmethod
    def _is_rest(cls, value: float, info: ValidationInfo) -> float:
        masked = info.data.get("mask_replace_prob", 0.0)
        if masked + value > 1:
            raise conflict(
                f"mask_replace_prob ({masked}) and random_replace_prob ({value}) are shares of the "
                "selected tokens: their sum must be at most 1"
            )
        return value
