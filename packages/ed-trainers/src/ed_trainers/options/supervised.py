"""Options of the methods that learn from given texts, labels and encoders. Free of jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.options import Count, Fraction, NotNegative, Positive, choice
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ed_trainers.options.base import (
    NoiseArguments,
    RowKind,
    StrictFlag,
    TrainingArguments,
    conflict,
)
from ed_trainers.options.optimizers import FractionBelowOne


class NextTokenArguments(TrainingArguments):
    """Options of the cross-entropy of the next token."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "label_smoothing": "label_smoothing_factor",
        "z_loss": "z_loss_coefficient",
    }
    EQUIVALENT: ClassVar[Mapping[str, str]] = {
        "loss_config": "label_smoothing_factor and z_loss_coefficient",
    }

    lmhead_chunksize: Count | None = None
    """Number of tokens whose logits exist at the same time; None: chosen by the loss."""
    label_smoothing_factor: FractionBelowOne = 0.0
    """Share of each target that is distributed over the whole vocabulary, in training only."""
    z_loss_coefficient: NotNegative = 0.0
    """Weight of the squared log of each token's softmax normalizer in the loss, in training
    only."""


class SFTArguments(NoiseArguments, NextTokenArguments):
    """Supervised fine-tuning, and pre-training: the cross-entropy of the labels."""

    predict_with_generate: StrictFlag = False
    """For models of speech: an evaluation also transcribes the held-out recordings, with greedy
    tokens, and logs `eval_wer` and `eval_cer`, the error rates of words and characters."""
    generation_max_length: Count | None = None
    """With `predict_with_generate`: most tokens of a transcript, with the tokens of language and
    task. None: the positions of the decoder."""
    trainer_type: Literal["sft"] = "sft"
    learning_rate: Positive = 2e-5
    mtp_loss_weight: NotNegative = 0.0
    """Weight of the loss of the MTP layer, the cross-entropy of the token after the next one. The
    layer is trained with the model, or alone with `trainable_rules` such as `["^mtp", true]`. A run
    file loads the layer of the checkpoint, or creates a layer. 0: the layer is not trained."""
    loss_type: Annotated[str, choice("loss_type", ("nll", "dft"), {"chunked_nll": "nll"})] = "nll"
    """`nll`: the cross-entropy. `dft` (dynamic fine-tuning, arXiv:2508.05629): the cross-entropy of
    each token times its probability, without gradient through the probability, in training only."""

    @property
    def trains_mtp(self) -> bool:
        """See `TrainingArguments`."""
        return self.mtp_loss_weight > 0

    @field_validator("loss_type")
    @classmethod
    def _has_no_further_terms(cls, value: str, info: ValidationInfo) -> str:
        for name in ("label_smoothing_factor", "z_loss_coefficient"):
            if value == "dft" and info.data.get(name):
                raise conflict(f"dft weights the cross-entropy of the targets alone: omit {name}")
        return value

    @field_validator("generation_max_length")
    @classmethod
    def _check_generation_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        # An invalid `predict_with_generate` is missing in `data`, and reported on its own.
        if value is not None and info.data.get("predict_with_generate") is False:
            raise conflict("generation_max_length has no effect without predict_with_generate")
        return value


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


class ClassifierArguments(TrainingArguments):
    """Options of the classes."""

    ROWS: ClassVar[str]

    label_names: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the classes, in the order of their numbers. Rows may contain names or numbers.
    `config.json` of the model contains the names (`id2label`, `label2id`)."""
    num_labels: Count | None = None
    """Number of classes. None: the number of `label_names`, or that of the model."""

    @field_validator("label_names")
    @classmethod
    def _differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({*value}) < len(value):
            raise conflict(f"label_names {list(value)}: each class needs a different name")
        return value

    @field_validator("num_labels")
    @classmethod
    def _counts_names(cls, value: int | None, info: ValidationInfo) -> int | None:
        names = info.data.get("label_names", ())
        if names and value not in (None, len(names)):
            raise conflict(f"num_labels is {value}, and label_names has {len(names)}: omit one")
        return value

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind(self.ROWS)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The fields of the model's configuration that the classes determine."""
        names = self.label_names
        if not names:
            return {} if self.num_labels is None else {"num_labels": self.num_labels}
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
        }


class SequenceClassificationArguments(ClassifierArguments):
    """Classification of texts, or of pairs of texts: the cross-entropy of the class of each row."""

    ROWS = "classification"

    trainer_type: Literal["sequence_classification"] = "sequence_classification"
    text_pairs: StrictFlag = False
    """Classify pairs of texts: rows also have `text_pair`, and the model reads token types."""

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind(f"pair_{self.ROWS}" if self.text_pairs else self.ROWS)


class ImageClassificationArguments(ClassifierArguments):
    """Classification of images: the cross-entropy of the class of each image."""

    ROWS = "image_classification"

    trainer_type: Literal["image_classification"] = "image_classification"


class TokenClassificationArguments(ClassifierArguments):
    """Classification of words, such as names of entities: the cross-entropy of the class of each
    word, at its first token. With class names such as `B-PER`, the F1 of entities is logged."""

    ROWS = "token_classification"

    trainer_type: Literal["token_classification"] = "token_classification"


class QuestionAnsweringArguments(TrainingArguments):
    """Extractive question answering: the first and the last token of an answer in a context."""

    DEFAULT_LENGTH = 384
    trainer_type: Literal["question_answering"] = "question_answering"
    doc_stride: Annotated[int, Field(ge=0, le=2**20)] = 128
    """Number of tokens that consecutive windows of a long context share."""

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind("answer", {"stride": self.doc_stride})


class MultipleChoiceArguments(TrainingArguments):
    """Multiple choice: the cross-entropy of the right one of several texts."""

    DEFAULT_LENGTH = 512
    trainer_type: Literal["multiple_choice"] = "multiple_choice"
    num_choices: Annotated[int, Field(ge=2, le=64)] = 4
    """Number of choices of a row: `choices`, a list of texts, or `choice_1`, `choice_2`, …."""

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind("choice", {"choices": self.num_choices})

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the choices of a row."""
        return tuple(f"choice_{number + 1}" for number in range(self.num_choices))


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


# --- encoders of texts ---

Temperatures = Annotated[
    tuple[Positive, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, int | float) else value),
]
#: The losses of `embedding`, with the names of sentence-transformers.
RANKING, COSINE, COSENT = "multiple_negatives_ranking", "cosine_similarity", "cosent"
MARGIN_MSE, MSE = "margin_mse", "mse"
EMBEDDING_LOSSES = (RANKING, COSINE, COSENT, MARGIN_MSE, MSE)
EMBEDDING_ALIASES = {
    "infonce": RANKING,
    "mnrl": RANKING,
    "MultipleNegativesRankingLoss": RANKING,
    "CosineSimilarityLoss": COSINE,
    "CoSENTLoss": COSENT,
    "MarginMSELoss": MARGIN_MSE,
    "MSELoss": MSE,
}
#: Losses that compare each pair with the other pairs of the step.
WHOLE_STEP = (RANKING, COSENT)
#: Losses of pairs with a score.
SCORED = (COSINE, COSENT)


class EmbeddingArguments(NoiseArguments, TrainingArguments):
    """Embeddings of texts: pairs with the same meaning, pairs with a score, or a teacher."""

    trainer_type: Literal["embedding"] = "embedding"
    num_negatives: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of negative texts of a row, for multiple_negatives_ranking and margin_mse: `negative`,
    a text or a list of texts, or `negative_1`, `negative_2`, …."""
    temperature: Temperatures = (0.05,)
    """Divisor of the cosines of multiple_negatives_ranking and cosent: 1 / `scale` of
    sentence-transformers. The losses of several temperatures are averaged."""
    symmetric: StrictFlag = False
    """With multiple_negatives_ranking: also find the anchor of each positive."""
    matryoshka_dims: tuple[Count, ...] = ()
    """Lengths to which embeddings are cut (arXiv:2205.13147); each length has a separate loss. The
    whole embedding has a loss only if its length is listed."""
    matryoshka_weights: tuple[Positive, ...] | None = None
    """Weights of the losses of `matryoshka_dims`; None: 1 each."""
    mini_batch_size: Count | None = None
    """Number of rows whose activations exist at the same time (GradCache, arXiv:2101.06983). The
    loss still compares all texts of the step. None: all rows."""
    loss_type: Annotated[
        str,
        choice("loss_type", EMBEDDING_LOSSES, EMBEDDING_ALIASES),
        Field(validate_default=True),
    ] = RANKING
    """`multiple_negatives_ranking` (InfoNCE, arXiv:1807.03748): the positive of each anchor among
    all positives and negatives of the step. `cosine_similarity` and `cosent`: the cosine of
    `sentence1` and `sentence2` follows `score`. `margin_mse`: the margin between positive and
    negatives equals that of a teacher. `mse`: each embedding equals that of `teacher_model`."""

    @field_validator("matryoshka_weights")
    @classmethod
    def _one_each(
        cls, value: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        dims = info.data.get("matryoshka_dims", value)
        if value is not None and len(value) != len(dims):
            raise conflict(
                f"{len(value)} weights for {len(dims)} matryoshka_dims: set one per dimension"
            )
        return value

    @field_validator("loss_type")
    @classmethod
    def _fits(cls, value: str, info: ValidationInfo) -> str:
        parts = info.data.get("gradient_accumulation_steps")
        negatives = info.data.get("num_negatives", 0)
        if value in WHOLE_STEP and parts not in (None, 1):
            raise conflict(
                f"embedding with loss_type {value} would compare texts only within a microbatch, "
                "not in the whole step: set gradient_accumulation_steps to 1, and mini_batch_size "
                "to limit the memory"
            )
        if value == MARGIN_MSE and not negatives:
            raise conflict("margin_mse compares a positive with negatives: set num_negatives")
        if negatives and value not in (RANKING, MARGIN_MSE):
            raise conflict(f"loss_type {value} reads no negatives: omit num_negatives")
        if value == MSE and info.data.get("matryoshka_dims"):
            raise conflict("mse compares whole embeddings: omit matryoshka_dims")
        return value

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the texts of a row."""
        if self.loss_type in SCORED:
            return ("sentence1", "sentence2")
        negatives = (f"negative_{number + 1}" for number in range(self.num_negatives))
        return ("anchor", "positive", *negatives)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the numbers of a row."""
        if self.loss_type in SCORED:
            return ("score",)
        count = self.num_negatives if self.loss_type == MARGIN_MSE else 0
        return tuple(f"margin_{number + 1}" for number in range(count))

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        if self.loss_type in SCORED:
            return RowKind("scored_pair")
        margins = self.loss_type == MARGIN_MSE
        if not self.num_negatives:
            return RowKind("embedding")
        return RowKind("embedding", {"negatives": self.num_negatives, "margins": margins})

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        reason = f"loss_type is {self.loss_type}"
        temperature_names = () if self.loss_type in WHOLE_STEP else ("temperature",)
        symmetric_names = () if self.loss_type == RANKING else ("symmetric",)
        unused = [
            name for name in (*temperature_names, *symmetric_names) if name in self.model_fields_set
        ]
        return [*super().idle(), *((name, reason) for name in unused)]


#: The losses of `cross_encoder`.
BCE, SCORE_MSE, CONTRASTIVE = "binary_cross_entropy", "mse", "localized_contrastive"
CROSS_ENCODER_LOSSES = (BCE, SCORE_MSE, CONTRASTIVE)
CROSS_ENCODER_ALIASES = {
    "bce": BCE,
    "BinaryCrossEntropyLoss": BCE,
    "MSELoss": SCORE_MSE,
    "lce": CONTRASTIVE,
}


class CrossEncoderArguments(TrainingArguments):
    """A cross-encoder (reranker): a score for each pair of a query and a document."""

    DEFAULT_LENGTH = 512
    trainer_type: Literal["cross_encoder"] = "cross_encoder"
    num_negatives: Annotated[int, Field(ge=0, le=1024)] = 0
    """With localized_contrastive: number of negative documents of a row: `negative`, a text or
    a list of texts, or `negative_1`, `negative_2`, …."""
    pos_weight: Positive | None = None
    """With binary_cross_entropy: factor on the loss of the label 1. None: 1."""
    loss_type: Annotated[
        str,
        choice("loss_type", CROSS_ENCODER_LOSSES, CROSS_ENCODER_ALIASES),
        Field(validate_default=True),
    ] = BCE
    """`binary_cross_entropy` and `mse`: the score of a pair follows its `label`, 0 to 1, or any
    number with `mse`. `localized_contrastive`: the cross-entropy of the positive document
    among the positive and the negative documents of its row (arXiv:2101.08751)."""

    @field_validator("loss_type")
    @classmethod
    def _fits(cls, value: str, info: ValidationInfo) -> str:
        negatives = info.data.get("num_negatives", 0)
        if (value == CONTRASTIVE) != (negatives > 0):
            change = "set num_negatives" if value == CONTRASTIVE else "omit num_negatives"
            reads = "compares" if value == CONTRASTIVE else "does not read"
            raise conflict(f"loss_type {value} {reads} negative documents: {change}")
        if value != BCE and info.data.get("pos_weight") is not None:
            raise conflict(f"pos_weight has no effect with loss_type {value}: omit it")
        return value

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the documents of a row that are compared; empty if a row has one document."""
        if self.loss_type != CONTRASTIVE:
            return ()
        return ("positive", *(f"negative_{i + 1}" for i in range(self.num_negatives)))

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        if self.loss_type == CONTRASTIVE:
            return RowKind("candidate", {"negatives": self.num_negatives})
        return RowKind("relevance")
