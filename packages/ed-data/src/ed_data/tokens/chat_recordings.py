"""Recordings in chats of audio-language models: placeholder tokens and spectrograms.

As in the processors of transformers, a recording is padded to a multiple of the length that the
encoder reads at once, such as 30 seconds, and each such part has equally many features (Voxtral).
For a model that ignores padding, a recording is one part with the features of its sound
(Qwen2-Audio).

Legend: b rows, i parts of the recordings of a row, m mel bins, f frames of a part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.rows.example import RowAudio
from ed_data.rows.recordings import header, read_samples
from ed_data.tokens.audio import checked_processor
from ed_data.tokens.images import round_up
from ed_data.tokens.items import MediumTokens

#: Largest number of recordings whose sizes are kept.
_KEPT = 2**17
#: Name of the mask of spectrograms.
_SOUND = "feature_attention_mask"


class RecordingSize(NamedTuple):
    """Numbers of parts and of features of a recording."""

    parts: int
    features: int


class RecordingLayout(Protocol):
    """The recordings that an audio-language model reads; `ed_models` implements the protocol."""

    @property
    def token(self) -> int:
        """Id of the placeholder token of a feature, which a chat template writes for a
        recording."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of mel bins and frames of a part."""
        ...

    @property
    def length(self) -> int:
        """Number of features of a part."""
        ...

    @property
    def includes_padding(self) -> bool:
        """Whether a shorter recording has the features of its padding, too."""
        ...

    def features(self, frames: int) -> int:
        """Return the number of features of a part with `frames` frames of sound."""
        ...


class RecordingEncoder:
    """Computes the tokens and the spectrograms of recordings; see `MediumEncoder`.

    Args:
        processor: the feature extractor and the tokenizer of the checkpoint.
        form: the recordings that the model reads.

    Raises:
        DataError: the processor has no feature extractor, or it has another number of mel bins than
            the model.
    """

    noun, part, reads = "recording", "audio", RowAudio
    video_token: int | None = None
    marks_prompts = False

    def __init__(self, processor: object, form: RecordingLayout) -> None:
        self._extract: Any = checked_processor(processor).feature_extractor
        self.token: int | None = form.token
        self.feature, self._form = form.token, form
        self._rate = int(self._extract.sampling_rate)
        #: Samples of a part.
        self._hop = int(self._extract.hop_length)
        self._samples = form.shape[1] * self._hop
        self._sizes: dict[str, RecordingSize] = {}
        bins = int(self._extract.feature_size)
        if bins != form.shape[0]:
            raise DataError(
                f"the feature extractor computes {bins} mel bins, but the model reads "
                f"{form.shape[0]}: use the feature extractor of the checkpoint"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the tokens and spectrograms depend on."""
        form = [self._form.token, *self._form.shape, self._form.length, self._form.includes_padding]
        text = json.dumps([self._extract.to_dict(), form], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def size(self, audio: RowAudio) -> RecordingSize:
        """Return the numbers of parts and features of a recording, from its header.

        Raises:
            DataError: the recording cannot be read, is too large, or has no feature or too many.
        """
        stored_size = self._sizes.get(audio.location)
        if stored_size is not None:
            return stored_size
        samples = header(audio).samples_at(self._rate)
        parts = -(-samples // self._samples)
        features = parts * self._form.length
        if not self._form.includes_padding:
            features = self._form.features(-(-samples // self._hop)) if parts == 1 else 0
        if not features:
            most = self._samples / self._rate
            raise DataError(
                f"{audio.location}: the recording has {samples / self._rate:.2f} seconds, and the "
                f"model reads recordings of at most {most:g} seconds with at least one feature: "
                "split it, or set on_error: skip"
            )
        if len(self._sizes) >= _KEPT:
            self._sizes.clear()
        self._sizes[audio.location] = RecordingSize(parts, features)
        return self._sizes[audio.location]

    def tokens(self, audio: RowAudio) -> MediumTokens:
        """Return one placeholder token for each feature of a recording."""
        parts, features = self.size(audio)
        return MediumTokens([self.feature] * features, parts)

    def width(self, rows: Sequence[Sequence[RowAudio]]) -> tuple[int, ...]:
        """Return the number of parts of a row, which is rounded so that few programs are
        compiled."""
        counts = [sum(self.size(audio).parts for audio in row) for row in rows]
        return (round_up(max([1, *counts])),)

    def arrays(
        self, recordings: Mapping[int, Sequence[RowAudio]], rows: int, width: tuple[int, ...]
    ) -> dict[str, NDArray[Any]]:
        """Return `input_features` float32 [b, i, m, f], padded with zeros, and for a model that
        ignores padding `feature_attention_mask` int32 [b, i, f], 1 for frames of sound.

        Raises:
            DataError: a recording cannot be decoded.
        """
        batch = np.zeros((rows, width[0], *self._form.shape), np.float32)
        sound = np.zeros((rows, width[0], self._form.shape[1]), np.int32)
        for row, row_recordings in recordings.items():
            filled = 0
            for audio in row_recordings:
                samples = read_samples(audio, self._rate)
                spectrograms = self._spectrograms(samples, audio)
                batch[row, filled : filled + len(spectrograms)] = spectrograms
                sound[row, filled, : -(-len(samples) // self._hop)] = 1
                filled += len(spectrograms)
        return {"input_features": batch, **({} if self._form.includes_padding else {_SOUND: sound})}

    def check(self, audio: RowAudio) -> None:
        """Decode a recording, whose tokens follow from its header alone.

        Raises:
            DataError: the recording cannot be decoded.
        """
        read_samples(audio, self._rate)

    def _spectrograms(self, samples: NDArray[np.float32], audio: RowAudio) -> NDArray[np.float32]:
        """Return the parts [p, m, f] of a recording, with the numbers of `VoxtralProcessor`."""
        bins, frames = self._form.shape
        output = self._extract(
            samples,
            sampling_rate=self._rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self._samples,
            return_tensors="np",
        )
        spectrum = np.asarray(output["input_features"][0], np.float32)
        spectrograms = spectrum.reshape(bins, -1, frames).swapaxes(0, 1)
        if len(spectrograms) != self.size(audio).parts:
            raise DataError(
                f"{audio.location}: the feature extractor returned {len(spectrograms)} parts, but "
                f"{self.size(audio).parts} follow from the length of the recording; use the "
                "feature extractor of the checkpoint"
            )
        return spectrograms
