"""Options of the methods that learn given tokens, spans, transcripts or captions. Free of jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from ed_infra.options import Count, Fraction, NotNegative, Positive
from pydantic import Field, ValidationInfo, field_validator

from ed_trainers.options.base import StrictFlag, TrainingArguments, conflict
from ed_trainers.options.classification import ClassifierArguments
from ed_trainers.options.optimizers import FractionBelowOne


class NextTokenArguments(TrainingArguments):
    """Options of the cross-entropy of the next token."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **TrainingArguments.ALIASES,
        "label_smoothing": "label_smoothing_factor",
        "z_loss": "z_loss_coefficient",
    }
    EQUIVALENT: ClassVar[Mapping[str, str]] = {
        **TrainingArguments.EQUIVALENT,
        "loss_config": "label_smoothing_factor and z_loss_coefficient",
    }

    lmhead_chunksize: Count | None = None
    """Number of tokens whose logits exist at the same time; None: chosen by the loss."""
    label_smoothing_factor: FractionBelowOne = 0.0
    """Share of each target that is distributed over the whole vocabulary, in training only."""
    z_loss_coefficient: NotNegative = 0.0
    """Weight of the squared log of each token's softmax normalizer in the loss, in training
    only."""


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


class CTCArguments(TrainingArguments):
    """Connectionist temporal classification (Graves et al. 2006): the log-probability of a
    transcript, summed over all alignments of its labels with the time steps.

    The model's configuration has `ctc_loss_reduction` and `ctc_zero_infinity`, as in transformers.
    An evaluation logs `eval_wer` and `eval_cer`, the error rates of words and characters."""

    DEFAULT_LENGTH: ClassVar[int] = 448

    trainer_type: Literal["ctc"] = "ctc"
    learning_rate: Positive = 1e-4


class TranscriptArguments(TrainingArguments):
    """Transcripts of held-out recordings."""

    predict_with_generate: StrictFlag = False
    """For models of speech: an evaluation also transcribes the held-out recordings, with greedy
    tokens, and logs `eval_wer` and `eval_cer`, the error rates of words and characters."""
    generation_max_length: Count | None = None
    """With `predict_with_generate`: most tokens of a transcript, with the tokens of language and
    task. None: the positions of the decoder."""

    @field_validator("generation_max_length")
    @classmethod
    def _check_generation_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        # An invalid `predict_with_generate` is missing in `data`, and reported on its own.
        if value is not None and info.data.get("predict_with_generate") is False:
            raise conflict("generation_max_length has no effect without predict_with_generate")
        return value


class ImageClassificationArguments(ClassifierArguments):
    """Classification of images: the cross-entropy of the class of each image."""

    ROWS = "image_classification"

    trainer_type: Literal["image_classification"] = "image_classification"


class ContrastiveArguments(TrainingArguments):
    """Images and their captions in one space: the loss of the model's family, CLIP's or SigLIP's,
    over all pairs of the step."""

    trainer_type: Literal["contrastive"] = "contrastive"

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _whole_step(cls, value: int) -> int:
        if value != 1:
            raise conflict(
                "contrastive would compare images and texts only within a microbatch, not in the "
                "whole step: set gradient_accumulation_steps to 1"
            )
        return value
