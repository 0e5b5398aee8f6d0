"""The encoder of Whisper: convolutions over a log-mel spectrogram, a table of positions, layers.

Legend: b recordings, m mel bins, f frames, t = f / 2 encoder positions, d hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_layers.convolution import Convolution
from ed_layers.parts import Parts
from ed_layers.sinusoids import SinusoidalPositions, fairseq
from ed_layers.updated import Updated
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.bart import BartForm

FORM = BartForm(pre_norm=True, embed_norm=False, key_bias=False, first_position=0)


class WhisperFrontEnd(nnx.Module):
    """Two convolutions over the frames of a spectrogram; the second halves their number."""

    def __init__(self, parts: Parts):
        config = parts.config
        d = config.hidden_size
        self.conv1 = Convolution(parts, config.num_mel_bins, d, taps=3, padding=1)
        self.conv2 = Convolution(parts, d, d, taps=3, stride=2, padding=1)

    def __call__(self, x: Float[Array, "b f m"]) -> Float[Array, "b t d"]:
        x = jax.nn.gelu(self.conv1(x), approximate=False)
        return jax.nn.gelu(self.conv2(x), approximate=False)


class WhisperPositions(nnx.Module):
    """The positions of the encoder: a table in the checkpoint, which is not trained."""

    def __init__(self, parts: Parts):
        config = parts.config
        rows = jnp.arange(config.max_source_positions)[None]
        table = SinusoidalPositions(fairseq(config.hidden_size), parts.param_dtype)(rows)[0]
        self.embedding = Updated(table, axes=(None, "embed"))
        self.dtype = parts.dtype

    def __call__(self, position_ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        # The positions of an encoder without padding are 0, 1, 2, ...
        return self.embedding.get_value()[None, : position_ids.shape[1]].astype(self.dtype)


def checked_frames(
    features: Float[Array, "b m f"], config: EasyDeLBaseConfig
) -> Float[Array, "b f m"]:
    """Return spectrograms with the frames first.

    Args:
        features: log-mel spectrograms.
        config: the configuration, with `num_mel_bins` and `max_source_positions`.

    Raises:
        ConfigError: the numbers of mel bins or frames differ from those of the model.
    """
    expected = config.num_mel_bins, 2 * config.max_source_positions
    if features.shape[1:] != expected:
        raise ConfigError(
            f"input_features has rows of {list(features.shape[1:])}, but the model reads "
            f"{list(expected)} (mel bins, frames): use the feature extractor of the checkpoint"
        )
    return features.swapaxes(1, 2)
