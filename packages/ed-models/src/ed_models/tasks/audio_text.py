"""Audio-language models: recordings and text in, text out.

Legend: b batch, s sequence, i parts of the recordings of a row, m mel bins, f frames, n features of
a row.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, cast

import jax
from ed_infra.errors import ConfigError
from ed_infra.inputs import SOUND, Encoded, Features, Inputs
from ed_infra.outputs import CausalLMOutput
from jaxtyping import Array, Float, Int

from ed_models.tasks.causal_lm import CausalLM


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

    def features(self, frames: int) -> int:
        """Return the number of features of a part with `frames` frames of sound."""
        if self.includes_padding:
            return self.length
        return (frames + 1) // 2 // (self.shape[1] // 2 // self.length)


class AudioBody(Protocol):
    """A body with an audio tower."""

    @property
    def positions_of_feature(self) -> int:
        """Number of encoder positions that become one feature."""
        ...

    def encode(self, input_features: jax.Array, /, **extra_inputs: jax.Array) -> Encoded:
        """Return the features of all recordings of a row."""
        ...


class AudioTextLM(CausalLM):
    """An audio tower and a language model under `model`, and a head.

    The k-th token `config.audio_token_id` of a row gets the k-th feature of the recordings of the
    row.
    """

    #: Names of the arrays of recordings.
    audio_names: ClassVar[tuple[str, ...]] = ("input_features",)
    input_names = (*CausalLM.input_names, *audio_names)

    @property
    def recording_form(self) -> RecordingForm:
        """The recordings that the model reads as items of a prompt."""
        config: Any = self.config
        audio = config.audio_config
        shape = audio.num_mel_bins, 2 * audio.max_source_positions
        length = audio.max_source_positions // cast(AudioBody, self.model).positions_of_feature
        return RecordingForm(config.audio_token_id, shape, length, SOUND not in self.audio_names)

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the features of `input_features` [b, i, m, f], in the order of the recordings."""
        extra_inputs = inputs.select(
            [name for name in self.audio_names if name != "input_features"]
        )
        return cast(AudioBody, self.model).encode(inputs["input_features"], **extra_inputs)

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        input_features: Float[Array, "b i m f"] | None = None,
        features: Features | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Run the audio tower, unless there are `features` or no recordings, and the language
        model.

        Args:
            input_ids: token ids [b, s], with one audio token for each feature.
            input_features: log-mel spectrograms; rows with fewer recordings are padded at the end.
            features: outputs of `encode` assigned to tokens, instead of `input_features`.
            inputs: further arguments of `CausalLM.__call__`, and further arrays of `audio_names`.
        """
        audio_inputs = {name: inputs.pop(name, None) for name in self.audio_names}
        extra_inputs = {name: array for name, array in audio_inputs.items() if array is not None}
        if input_features is not None and features is None:
            if input_ids is None:
                raise ConfigError(
                    "input_features require input_ids, which contain the audio tokens"
                )
            encoded = self.encode(Inputs({"input_features": input_features, **extra_inputs}))
            audio_token_id: int = self.config.audio_token_id
            features = Features.at(encoded.embeddings, input_ids == audio_token_id)
        return super().__call__(input_ids, features=features, **inputs)


class MaskedAudioTextLM(AudioTextLM):
    """An audio-language model whose features depend on the length of a recording.

    `feature_attention_mask` [b, i, f] is 1 for frames of sound, and 0 for the padding after them.
    """

    audio_names = (*AudioTextLM.audio_names, SOUND)
    input_names = (*CausalLM.input_names, *audio_names)
