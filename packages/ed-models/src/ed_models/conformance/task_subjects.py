"""Subjects of other tasks than causal language modelling, and the subjects of families.

Legend: b rows, s positions, t encoder positions, v vocabulary, d hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.inputs import Encoded, Inputs
from ed_infra.testing import require_torch

from ed_models.conformance.image_subjects import (
    ImageClassifierSubject,
    ImageTextMatchSubject,
    VisionSubject,
)
from ed_models.conformance.image_text import (
    AudioTextSubject,
    ImageTextSubject,
    TileGridSubject,
)
from ed_models.conformance.packed_images import PackedImageTextSubject
from ed_models.conformance.patched_images import (
    PatchedImageTextSubject,
    PlacedImageTextSubject,
    RasterImageTextSubject,
)
from ed_models.conformance.subjects import B, Cases, S, Subject
from ed_models.modalities.images import GRID_TILES, PATCHES, PLACES, RASTER_PATCHES
from ed_models.modalities.items import Modality
from ed_models.modalities.videos import FRAMES, TIMED_FRAMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Fields of a tiny encoder like BERT.
TINY_ENCODER: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
#: Fields of a tiny encoder-decoder like BART.
TINY_BART: dict[str, Any] = {
    "vocab_size": 160,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
ENCODER_TASKS = (
    *(TaskType.MASKED_LM, TaskType.BASE_MODULE, TaskType.SEQUENCE_CLASSIFICATION),
    *(TaskType.TOKEN_CLASSIFICATION, TaskType.QUESTION_ANSWERING, TaskType.MULTIPLE_CHOICE),
)


class Seq2SeqSubject(Subject):
    """An encoder-decoder: the encoder reads the padded rows, the decoder other tokens."""

    task = TaskType.SEQUENCE_TO_SEQUENCE

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        rng = np.random.default_rng(1)
        self.answers = rng.integers(3, self.vocab_size, (B, S)).astype(np.int32)

    @property
    def encoder_length(self) -> int:
        return self.encoded.segment_ids.shape[1]

    @functools.cached_property
    def encoded(self) -> Encoded:
        """Outputs of the encoder for rows without padding."""
        return self.model.encode(Inputs({"input_ids": jnp.asarray(self.ids)}))

    def inputs(self, rows: slice = slice(None), at: slice = slice(None)) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": self.answers[rows, at]}
        if not at.start:  # later steps read the cache
            arguments["encoded"] = jax.tree.map(lambda x: x[rows], self.encoded)
        return arguments

    def step(self, at: np.ndarray) -> dict[str, Any]:
        return {"input_ids": np.where(at < 0, 0, self.answers.reshape(-1)[at])[None]}

    def paged_cache(self, num_pages: int, page_size: int) -> Any:
        sizes = {"num_states": B, "encoder_length": self.encoder_length}
        cache = self.model.init_paged_cache(num_pages, page_size, **sizes)
        for row in range(B):
            one = jax.tree.map(lambda x, row=row: x[row : row + 1], self.encoded)
            cache = self.model.write_encoded(cache, one, row)
        return cache

    def build_full_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.ids, "decoder_input_ids": self.answers}

    def build_row_inputs(self, row: int) -> dict[str, Any]:
        rows = slice(row, row + 1)
        return {
            "input_ids": self.ids[rows, self.pad[row] :],
            "decoder_input_ids": self.answers[rows],
        }

    def documents(self) -> tuple[dict[str, Any], list[tuple[np.ndarray, dict[str, Any]]]]:
        packed, parts = super().documents()
        answers = self.answers.reshape(1, -1)
        packed |= {
            "decoder_input_ids": answers[:, :48],
            "decoder_segment_ids": packed["segment_ids"],
        }
        return packed, [
            (at, {**inputs, "decoder_input_ids": answers[:, at]}) for at, inputs in parts
        ]

    def training(self) -> dict[str, Any]:
        return {"input_ids": self.ids, "labels": self.answers}

    @property
    def real(self) -> np.ndarray:
        return np.ones((B, S), bool)

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        torch = require_torch()
        answers = torch.tensor(self.answers, dtype=torch.long)
        logits, row = [], 0
        for inputs in self.torch_inputs():
            rows = answers[row : row + len(next(iter(inputs.values())))]
            with torch.no_grad():
                result = model(**inputs, decoder_input_ids=rows, use_cache=False)
            logits.append(self.output(result).float().numpy())
            row += len(rows)
        return np.concatenate(logits)

    def torch_loss(self) -> Any:
        torch = require_torch()
        ids, answers = (torch.tensor(x, dtype=torch.long) for x in (self.ids, self.answers))
        return self.torch_model(input_ids=ids, labels=answers, use_cache=False).loss


class SpeechSubject(Seq2SeqSubject):
    """An encoder-decoder that reads a spectrogram, or padded samples of sound."""

    checks = tuple(name for name in Subject.checks if name != "packed")
    task = TaskType.SPEECH_SEQUENCE_TO_SEQUENCE
    zero_gradient = 16.0  # that of the bias that all keys share

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        self.sounds = Sounds.of(module_class, self.fields)

    @functools.cached_property
    def encoded(self) -> Encoded:
        return self.model.encode(Inputs(self.sounds.whole))

    def build_full_inputs(self) -> dict[str, Any]:
        return {**self.sounds.whole, "decoder_input_ids": self.answers}

    def build_padded_inputs(self) -> dict[str, Any]:
        return {**self.sounds.padded, "decoder_input_ids": self.answers}

    def build_row_inputs(self, row: int) -> dict[str, Any]:
        return {
            **self.sounds.build_row_inputs(row),
            "decoder_input_ids": self.answers[row : row + 1],
        }

    def prompts(self) -> dict[str, Any]:
        return self.sounds.padded

    def training(self) -> dict[str, Any]:
        return {**self.sounds.whole, "labels": self.answers}

    def torch_inputs(self) -> list[dict[str, Any]]:
        return [self.sounds.torch(row) for row in range(B)]

    def torch_loss(self) -> Any:
        torch = require_torch()
        answers = torch.tensor(self.answers, dtype=torch.long)
        return self.torch_model(**self.sounds.torch(), labels=answers, use_cache=False).loss


@dataclass(frozen=True)
class Sounds:
    """The inputs of a model for speech.

    Attributes:
        name: name of the array.
        values: [b, mel bins, frames], or samples [b, n].
        lengths: number of real samples of each row; None if rows have no padding.
    """

    name: str
    values: np.ndarray
    lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, module_class: type[Any], fields: Mapping[str, Any]) -> Self:
        """Create random inputs for a model."""
        name, rng = module_class.input_names[0], np.random.default_rng(2)
        if name == "input_features":
            shape = B, fields["num_mel_bins"], 2 * fields["max_source_positions"]
            return cls(name, rng.normal(size=shape).astype(np.float32), None)
        return cls(name, rng.normal(size=(B, 7000)).astype(np.float32), (7000, 6200, 7000, 4100))

    @property
    def whole(self) -> dict[str, Any]:
        """The arguments of rows without padding."""
        return {self.name: jnp.asarray(self.values)}

    @property
    def padded(self) -> dict[str, Any]:
        """The arguments of rows with padding at their end."""
        if self.lengths is None:
            return self.whole
        mask = (np.arange(self.values.shape[1]) < np.array(self.lengths)[:, None]).astype(np.int32)
        return {self.name: jnp.asarray(self.values * mask), "attention_mask": jnp.asarray(mask)}

    def build_row_inputs(self, row: int) -> dict[str, Any]:
        """Return the arguments of one row without its padding."""
        end = None if self.lengths is None else self.lengths[row]
        return {self.name: jnp.asarray(self.values[row : row + 1, ..., :end])}

    def torch(self, row: int | None = None) -> dict[str, Any]:
        """Return the arguments of all rows, or of one row without its padding, for torch."""
        arguments = self.whole if row is None else self.build_row_inputs(row)
        return {name: require_torch().tensor(np.asarray(x)) for name, x in arguments.items()}


class EncoderSubject(Subject):
    """A bidirectional encoder with a head that predicts tokens."""

    checks = ("parity", "gradients", "saved", "packed", "padding", "layouts", "meshes")
    task = TaskType.MASKED_LM
    # The gradient of a bias that all keys, or all scored tokens, share is zero.
    zero_gradient = 16.0

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        rows = []
        for inputs in self.torch_inputs():
            with require_torch().no_grad():
                out = self.output(model(**inputs)).float().numpy()
            rows.append(np.pad(out, ((0, 0), (S - out.shape[1], 0), (0, 0))))
        return np.concatenate(rows)

    def torch_inputs(self) -> list[dict[str, Any]]:
        """Return each row without its padding: positions of encoders follow from the inputs."""
        torch = require_torch()
        ids = [
            torch.tensor(row[None, p:]).long() for row, p in zip(self.ids, self.pad, strict=True)
        ]
        return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]

    def training(self) -> dict[str, Any]:
        return {**self.build_full_inputs(), **self.labels()}

    def labels(self) -> dict[str, np.ndarray]:
        """Return the labels: every third token."""
        return {"labels": np.where(np.arange(S) % 3 == 0, self.ids, -100)}

    def torch_loss(self) -> Any:
        torch = require_torch()
        arrays = {name: torch.tensor(x).long() for name, x in self.training().items()}
        mask = torch.ones_like(arrays["input_ids"])
        return self.torch_model(**arrays, attention_mask=mask).loss


class BodySubject(EncoderSubject):
    """An encoder without a head."""

    checks = ("parity", "gradients", "saved")
    task = TaskType.BASE_MODULE

    def output(self, result: Any) -> Any:
        return result.last_hidden_state

    def labels(self) -> dict[str, np.ndarray]:
        return {}

    def torch_loss(self) -> Any:
        ids = require_torch().tensor(self.ids).long()
        return self.output(self.torch_model(input_ids=ids)).square().mean()


class TokenSubject(EncoderSubject):
    """An encoder that classifies tokens."""

    checks = ("parity", "gradients", "saved", "packed")
    task = TaskType.TOKEN_CLASSIFICATION

    def labels(self) -> dict[str, np.ndarray]:
        return {"labels": np.where(np.arange(S) % 3 == 0, self.ids % 2, -100)}


class AnswerSubject(EncoderSubject):
    """An encoder that scores tokens as start and end of an answer."""

    checks = ("parity", "gradients", "saved")
    task = TaskType.QUESTION_ANSWERING

    def output(self, result: Any) -> Any:
        span_logits = result.start_logits, result.end_logits
        stack = jnp.stack if isinstance(span_logits[0], jax.Array) else require_torch().stack
        return stack(span_logits, -1)

    def labels(self) -> dict[str, np.ndarray]:
        # The third row has no answer within the text.
        return {"start_positions": np.array([3, 0, S, 5]), "end_positions": np.array([4, 9, S, 5])}


class ClassifierSubject(EncoderSubject):
    """An encoder that classifies texts."""

    checks = ("parity", "gradients", "saved")
    task = TaskType.SEQUENCE_CLASSIFICATION
    saved_bound = 1e-6  # torch's product of one row depends on its place in memory

    def labels(self) -> dict[str, np.ndarray]:
        return {"labels": np.array([1, 0, 1, 1])}

    @property
    def real(self) -> np.ndarray:
        return np.ones(B, bool)

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        with require_torch().no_grad():
            rows = [self.output(model(**inputs)) for inputs in self.torch_inputs()]
        return require_torch().cat(rows).float().numpy()


class ChoiceSubject(ClassifierSubject):
    """An encoder that scores two choices of a row."""

    task = TaskType.MULTIPLE_CHOICE

    def build_full_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.ids.reshape(B // 2, 2, S)}

    def build_padded_inputs(self) -> dict[str, Any]:
        return {**self.build_full_inputs(), "attention_mask": self.mask.reshape(B // 2, 2, S)}

    def labels(self) -> dict[str, np.ndarray]:
        return {"labels": np.array([1, 0])}

    @property
    def real(self) -> np.ndarray:
        return np.ones((B // 2, 2), bool)

    def torch_inputs(self) -> list[dict[str, Any]]:
        return [{n: x[:, None] for n, x in row.items()} for row in super().torch_inputs()]

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        return super().torch_outputs(model).reshape(B // 2, 2)


class CTCSubject(Subject):
    """An encoder of speech with a head for every time step."""

    checks = ("parity", "gradients", "saved", "padding", "layouts", "meshes")
    task = TaskType.CTC
    zero_gradient = 16.0  # that of the bias that all keys share

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        self.sounds = Sounds.of(module_class, self.fields)

    def build_full_inputs(self) -> dict[str, Any]:
        return self.sounds.whole

    def build_padded_inputs(self) -> dict[str, Any]:
        return self.sounds.padded

    def build_row_inputs(self, row: int) -> dict[str, Any]:
        return self.sounds.build_row_inputs(row)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Number of time steps of each row."""
        assert self.sounds.lengths is not None
        return np.asarray(self.model.output_lengths(jnp.asarray(self.sounds.lengths)))

    @property
    def real(self) -> np.ndarray:
        return np.arange(max(self.lengths)) < self.lengths[:, None]

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        with require_torch().no_grad():
            rows = [self.output(model(**self.sounds.torch(row))).numpy() for row in range(B)]
        steps = max(row.shape[1] for row in rows)
        return np.concatenate(
            [np.pad(row, ((0, 0), (0, steps - row.shape[1]), (0, 0))) for row in rows]
        )

    def torch_loss(self) -> Any:
        return self.output(self.torch_model(**self.sounds.torch())).square().mean()


#: Task -> the subject of a family with this task.
SUBJECTS: Mapping[TaskType, type[Subject]] = {
    kind.task: kind
    for kind in (
        *(Subject, ImageTextSubject, Seq2SeqSubject, SpeechSubject, EncoderSubject, BodySubject),
        *(ClassifierSubject, TokenSubject, AnswerSubject, ChoiceSubject, CTCSubject),
        *(VisionSubject, ImageClassifierSubject, ImageTextMatchSubject, AudioTextSubject),
    )
}
#: Layout of images -> the subject, instead of that of the task.
FURTHER: Mapping[Modality | None, type[Subject]] = {
    PATCHES: PatchedImageTextSubject,
    FRAMES: PatchedImageTextSubject,
    TIMED_FRAMES: PatchedImageTextSubject,
    RASTER_PATCHES: RasterImageTextSubject,
    PLACES: PlacedImageTextSubject,
    GRID_TILES: TileGridSubject,
}


def subjects(cases: Mapping[str, Cases]) -> list[Subject]:
    """Return the subjects of families.

    Args:
        cases: model type -> the tiny configurations.

    Raises:
        ValueError: a family has no configuration.
    """
    family_subjects: list[Subject] = []
    for model_type, family_cases in cases.items():
        if not family_cases.rows:
            raise ValueError(
                f"{model_type!r} has no tiny configuration: add one to its Cases, such as "
                '{"special feature": {field: value}}'
            )
        for task in family_cases.tasks or registry.list_tasks(model_type)[:1]:
            module_class = registry.get_module(task, model_type)
            modality = getattr(module_class, "modality", None)
            for row, fields in family_cases.rows.items():
                kind = FURTHER.get(modality, SUBJECTS[task])
                if fields.get("vision_config", {}).get("model_type") == "pixtral":
                    kind = PackedImageTextSubject
                family_subjects.append(kind(model_type, row, module_class, family_cases))
    return family_subjects
