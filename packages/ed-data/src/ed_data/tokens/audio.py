"""Recordings for models of speech: features and the tokens of transcripts, by a processor.

The processor is that of the checkpoint (`transformers.AutoProcessor`). Its feature extractor
computes the features of each recording alone.

Legend: b rows, n samples, m mel bins, f frames, t tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.kinds.record import KindOfRows
from ed_data.rows.example import Example, RowAudio
from ed_data.rows.recordings import header, read_samples
from ed_data.tokens.items import append_eos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Longest recording for models that read samples, if no inform limits the durations.
LONGEST_SECONDS = 20.0
#: With `padding: longest`, samples are padded to a multiple of this many seconds.
_MULTIPLE_SECONDS = 1.0


class FeatureExtractor(Protocol):
    """The feature extractor of a checkpoint, such as `transformers.WhisperFeatureExtractor`."""

    sampling_rate: int
    model_input_names: list[str]

    def __call__(
        self, raw_speech: NDArray[np.float32], /, *, sampling_rate: int, return_tensors: str
    ) -> Any: ...

    def to_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class SpeechProcessor(Protocol):
    """A processor of transformers, such as `WhisperProcessor`."""

    feature_extractor: FeatureExtractor
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class TimeSteps:
    """The convolutions that turn samples into time steps of a CTC model.

    Attributes:
        kernels: samples or steps that each convolution reads.
        strides: distance of two outputs of each convolution.
    """

    kernels: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, samples: int) -> int:
        """Return the number of time steps of a recording."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            samples = max(samples - kernel, -stride) // stride + 1
        return samples


class AudioEncoder:
    """Computes the features of recordings, and completes the tokens of their transcripts.

    Args:
        processor: the processor of the checkpoint.
        kind: the kind of the rows, each with a recording.
        language: code of the language of the transcripts; None keeps the setting of the tokenizer.
        speech_task: `"transcribe"` or `"translate"`; None keeps the setting of the tokenizer.
        start: first token that the decoder reads; None without a decoder.
        steps: time steps of recordings, for models that score the labels of each; else None.
        longest: longest recording in seconds, for models that read samples.
        padded: whether samples are padded to `longest`; otherwise to the longest recording of the
            batch.

    Raises:
        DataError: the processor has no feature extractor, or the tokenizer does not know the
            language or the task.
    """

    def __init__(
        self,
        processor: object,
        kind: KindOfRows,
        *,
        language: str | None = None,
        speech_task: str | None = None,
        start: int | None = None,
        steps: TimeSteps | None = None,
        longest: float = LONGEST_SECONDS,
        padded: bool = True,
    ) -> None:
        processor = checked_processor(processor)
        self.processor, self.kind, self.start, self.steps = processor, kind, start, steps
        self.extract, self.tokenizer = processor.feature_extractor, processor.tokenizer
        self.rate = int(self.extract.sampling_rate)
        #: The array that the model reads.
        self.name = self.extract.model_input_names[0]
        #: Shape [m, f] of the features of every recording; None for models that read samples.
        self.window: tuple[int, int] | None = None
        self.longest = longest
        if self.name == "input_features":
            extract: Any = self.extract
            self.window = extract.feature_size, extract.nb_max_frames
            self.longest = extract.n_samples / self.rate
        self._padded = padded
        self._set_prefix(language, speech_task)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the features and tokens depend on."""
        values = [self.extract.to_dict(), self.kind.task, self.start, self.longest, self._padded]
        if self.steps is not None:
            values.append([self.steps.kernels, self.steps.strides])
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def labels(self, tokens: list[int], eos: int) -> list[int]:
        """Return the labels of a transcript.

        Those of an encoder-decoder end with the end token. The first token that the decoder reads
        is not a label.
        """
        if not self.kind.has_decoder:
            return tokens
        return append_eos(tokens[1:] if tokens[:1] == [self.start] else tokens, eos)

    def check(
        self, document: Example, tokens: Sequence[int], limit: int | None, label: str
    ) -> None:
        """Check that a recording and its transcript fit the model; neither is cut.

        Args:
            document: the document.
            tokens: the labels.
            limit: largest number of labels.
            label: name of the inform, for messages.

        Raises:
            DataError: the recording or the transcript is too long, or the recording cannot be read.
        """
        (audio,) = document.recordings
        if limit is not None and len(tokens) > limit:
            raise DataError(
                f"inform {label!r}, {document.place}: the transcript has {len(tokens)} tokens, and "
                f"the limit is {limit}: transcripts are not cut; increase the sequence length, or "
                "set on_error: skip"
            )
        facts = header(audio)
        if facts.seconds > self.longest:
            reads = "the limit is" if self.window is None else "the model reads"
            raise DataError(
                f"{audio.location}: the recording has {facts.seconds:.2f} seconds, and "
                f"{reads} {self.longest:g}: recordings are not cut; split it, or set "
                "max_duration_in_seconds, which "
                + ("increases the limit" if self.window is None else "drops longer recordings")
            )
        if self.steps is None:
            return
        steps = self.steps.of(facts.samples_at(self.rate))
        needed = count_ctc_steps(tokens)
        if needed > steps:
            raise DataError(
                f"{audio.location}: the transcript needs {needed} time steps (one for each "
                f"of {len(tokens)} labels and between equal labels), and the recording of "
                f"{facts.seconds:.2f} seconds has {steps}: correct the row, or set on_error: skip"
            )

    def arrays(
        self, recordings: Mapping[int, RowAudio], rows: int, width: int
    ) -> dict[str, NDArray[Any]]:
        """Return the features of a batch; rows without a recording are zero.

        Args:
            recordings: number of a row -> its recording.
            rows: b.
            width: n, the samples of a padded row; see `width`.

        Returns:
            `input_features` float32 [b, m, f], or `input_values` float32 [b, n] and
            `attention_mask` int32 [b, n], 1 for samples.
        """
        if self.window is not None:
            values = np.zeros((rows, *self.window), np.float32)
            for row, audio in recordings.items():
                values[row] = self._features(audio)
            return {self.name: values}
        values, mask = np.zeros((rows, width), np.float32), np.zeros((rows, width), np.int32)
        for row, audio in recordings.items():
            samples = self._features(audio)
            values[row, : len(samples)], mask[row, : len(samples)] = samples, 1
        return {self.name: values, "attention_mask": mask}

    def width(self, recordings: Sequence[RowAudio]) -> int:
        """Return the samples of a padded row of a batch with these recordings."""
        most = int(np.ceil(self.longest * self.rate))
        if self.window is not None or self._padded:
            return most
        longest = max(
            (header(recording).samples_at(self.rate) for recording in recordings), default=1
        )
        multiple = int(_MULTIPLE_SECONDS * self.rate)
        return min(-(-longest // multiple) * multiple, most)

    def _features(self, audio: RowAudio) -> NDArray[np.float32]:
        samples = read_samples(audio, self.rate)
        features = self.extract(samples, sampling_rate=self.rate, return_tensors="np")
        return np.asarray(features[self.name][0], np.float32)

    def _set_prefix(self, language: str | None, task: str | None) -> None:
        """Let the tokenizer begin transcripts with the tokens of a language and a task."""
        if language is None and task is None:
            return
        setter = getattr(self.tokenizer, "set_prefix_tokens", None)
        key = "language" if language is not None else "task"
        path = ("tokenization", key)
        if setter is None:
            raise DataError(
                f"{key}={language or task!r} has no effect: {type(self.tokenizer).__name__} has no "
                "tokens of languages and tasks; omit it",
                path,
            )
        if language is not None and f"<|{language}|>" not in self.tokenizer.get_vocab():
            raise DataError(
                f"language={language!r} is not a language of the tokenizer: use a tokenizer with "
                f"the token <|{language}|>, or omit the language",
                path,
            )
        setter(language=language, task=task)
        expected_tokens = [f"<|{name}|>" for name in (language, task) if name is not None]
        prefix: Any = self.tokenizer
        prefix_tokens = prefix.convert_ids_to_tokens(prefix.prefix_tokens)
        if any(token not in prefix_tokens for token in expected_tokens):
            raise DataError(
                f"{key}={language or task!r}: transformers begins transcripts with {prefix_tokens} "
                "instead "
                f"of {expected_tokens}, because the tokenizer does not have the tokens of all "
                "languages in "
                "their usual order; use a tokenizer of Whisper",
                path,
            )


def checked_processor(processor: object) -> SpeechProcessor:
    """Return a processor with a feature extractor and a tokenizer.

    Raises:
        DataError: one of them is missing.
    """
    if isinstance(processor, SpeechProcessor):
        return processor
    names = ("feature_extractor", "tokenizer")
    missing = next(name for name in names if not hasattr(processor, name))
    raise DataError(
        f"{type(processor).__name__} is not a processor of speech: it has no {missing!r}; "
        "pass the AutoProcessor of a checkpoint such as Whisper"
    )


def count_ctc_steps(labels: Sequence[int]) -> int:
    """Return the fewest time steps of a CTC path: one for each label, and between equal labels."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))
