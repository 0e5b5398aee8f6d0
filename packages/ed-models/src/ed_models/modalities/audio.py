"""Recordings of language models: the parts of a recording that an audio tower reads at once.

Legend: b rows, s positions, m mel bins, f frames of a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self, cast

import numpy as np
from ed_infra.inputs import SOUND
from jaxtyping import Float

from ed_models.modalities.items import FixedItems, ItemArrays, Modality
from ed_models.protocol import LanguageModel


class RecordingForm(NamedTuple):
    """The recordings that an audio-language model reads as items of a prompt.

    Attributes:
        token: id of the placeholder token of a feature.
        shape: numbers of mel bins and frames of the part of a recording that the tower reads at
            once.
        length: number of features of a part.
        includes_padding: whether a shorter recording has the features of its padding, too.
            Otherwise a recording has one part.
    """

    token: int
    shape: tuple[int, int]
    length: int
    includes_padding: bool = True

    @classmethod
    def of(cls, model: LanguageModel) -> Self:
        """Return the recordings of an audio-language model."""
        audio_model = cast(Any, model)
        config, names = audio_model.config, audio_model.modality.names
        length = config.audio_config.max_source_positions
        shape = config.audio_config.num_mel_bins, 2 * length
        length //= audio_model.model.positions_of_feature
        return cls(config.audio_token_id, shape, length, SOUND not in names)

    def features(self, frames: int) -> int:
        """Return the number of features of a part with `frames` frames of sound."""
        if self.includes_padding:
            return self.length
        return (frames + 1) // 2 // (self.shape[1] // 2 // self.length)

    def split_recording(
        self, spectrogram: Float[np.ndarray, "m _"], frames: int
    ) -> tuple[list[dict[str, np.ndarray]], int]:
        """Return the arrays of the parts of a recording, and the number of features of a part.

        Args:
            spectrogram: log-mel spectrogram, padded to a multiple of f frames.
            frames: number of frames of sound.
        """
        bins, size = self.shape
        parts = spectrogram.reshape(bins, -1, size).swapaxes(0, 1)
        items = [{"input_features": np.ascontiguousarray(part)} for part in parts]
        if self.includes_padding:
            return items, self.length
        items[0][SOUND] = (np.arange(size) < frames).astype(np.int32)
        return items, self.features(frames)


class Recordings(FixedItems):
    """Spectrograms of parts of recordings, of the length of `audio_config`."""

    def __init__(self, model: LanguageModel, max_model_len: int) -> None:
        self._form = RecordingForm.of(model)
        example: dict[str, np.ndarray] = {"input_features": np.zeros(self._form.shape, np.float32)}
        if not self._form.includes_padding:
            example[SOUND] = np.ones(self._form.shape[1], np.int32)
        super().__init__(model, example)

    def count_features(self, arrays: ItemArrays) -> int:
        """Return the number of features of a part: with a mask, those of its sound."""
        if SOUND not in arrays:
            return self.longest
        return self._form.features(int(np.sum(np.asarray(arrays[SOUND]) != 0)))


#: Parts of recordings whose padding has features, too.
RECORDINGS = Modality("recordings", "recordings", "audio_token_id", ("input_features",), Recordings)
#: Recordings of one part, with a mask that is 1 for frames of sound and 0 for the padding after.
MASKED_RECORDINGS = RECORDINGS._replace(name="masked recordings", names=("input_features", SOUND))
