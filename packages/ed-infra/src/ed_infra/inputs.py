"""`Inputs`: the named arrays of a batch, each with its logical axes.

A loader, a collator or a request creates the arrays. Placement, train step, loss, model call,
`generate` and engine pass them on unchanged. A component that needs one array reads the array
by its name and ignores the others.

Every array has the axis `batch` first, so a batch can be split into microbatches and sharded over
devices without knowledge of its content. Images of one size are therefore `pixel_values` [b, i, c,
h, w], padded to the largest number of images of a row. Images of different sizes are packed
patches: `pixel_values` [b, p, f] contains the patches of all images of a row, one image after
another, and `image_grid_thw` [b, i, 3] the number of patches of each image along time, height and
width; both are padded with zeros. A spectrogram is `input_features`, [b, mel bins, frames], or [b,
i, mel bins, frames] for models that read several recordings; samples of sound are `input_values`,
[b, samples].

Legend: b rows, s positions, t encoder positions, i images of a row, p patches of a row, f numbers
of a patch, n features of a row, d hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ed_infra.errors import ConfigError
from ed_infra.sharding.axes import LogicalAxes

_TOKENS: LogicalAxes = ("batch", "sequence")
#: Name of the numbers of patches of images along time, height and width, [b, i, 3].
GRID = "image_grid_thw"
#: Name of the places of images along time, [b, i]: 0 for an image and for the first frame of a
#: video, and 1 + the position along time for each further frame, which continues the video.
TIMES = "image_times"
#: Names of the heights and widths of images, [b, i, 2], and of their rows and columns of tiles,
#: [b, i, 2]. Models that omit padding read these arrays.
SIZES, GRIDS = "image_sizes", "image_grids"
#: Name of the column and row of each patch of an image in the output of a processor, [i, p, 2], in
#: which -1 is padding (Gemma 4).
POSITIONS = "image_position_ids"
#: Name of outputs of a vision encoder, [b, n, d], which a model reads instead of images.
IMAGE_FEATURES = "image_features"
#: Name of the mask of spectrograms, [b, i, frames]: 1 for frames of sound, 0 for the padding after.
SOUND = "feature_attention_mask"
#: Name of the numbers of images of each text in the output of a processor. A processor that returns
#: the numbers splits an image into tiles only if its text has no other image (LLaVA-OneVision).
COUNTS = "batch_num_images"

#: Name of the experts of each token in each layer, [b, s, layers, k].
ROUTED_EXPERTS = "routed_experts"
#: Name of the tokens from which each token was sampled, as bits, [b, s, w]; of losses.
SAMPLING_MASKS = "sampling_masks"

#: Logical axes of the arrays that models read, by name. An array with another name has the axes
#: that `Inputs` receives for it, or `batch` followed by unsharded axes.
AXES: Mapping[str, LogicalAxes] = {
    "input_ids": _TOKENS,
    "attention_mask": _TOKENS,
    "segment_ids": _TOKENS,
    "position_ids": _TOKENS,
    "token_type_ids": _TOKENS,
    "labels": _TOKENS,
    "loss_weights": _TOKENS,
    "decoder_input_ids": _TOKENS,
    "decoder_attention_mask": _TOKENS,
    "decoder_segment_ids": _TOKENS,
    "decoder_position_ids": _TOKENS,
    "input_features": ("batch", None, None),
    "input_values": ("batch", None),
    "encoder_outputs": ("batch", None, "hidden_state"),
    IMAGE_FEATURES: ("batch", None, None),
    "inputs_embeds": ("batch", "sequence", "hidden_state"),
    ROUTED_EXPERTS: ("batch", "sequence", None, None),
    SAMPLING_MASKS: ("batch", "sequence", None),
    "pixel_values": ("batch", None, None, None, None),
    GRID: ("batch", None, None),
    TIMES: ("batch", None),
    SIZES: ("batch", None, None),
    GRIDS: ("batch", None, None),
    "pixel_attention_mask": ("batch", None, None, None),
    SOUND: ("batch", None, None),
}
#: A second form of arrays in `AXES`, with another number of axes: packed patches, and several
#: spectrograms of a row.
OTHER_FORMS: Mapping[str, LogicalAxes] = {
    "pixel_values": ("batch", None, None),
    "input_features": ("batch", None, None, None),
}


def get_logical_axes(name: str, rank: int) -> LogicalAxes | None:
    """Return the logical axes of an array that models read; None for an array with another name.

    Args:
        name: name of the array.
        rank: number of its axes, which selects the form of the array. The result has another
            length if the array has no form with this number of axes.
    """
    other_form = OTHER_FORMS.get(name)
    return other_form if other_form is not None and len(other_form) == rank else AXES.get(name)


class Shaped(Protocol):
    """An array of numpy or jax, or an abstract array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        ...


ArrayT = TypeVar("ArrayT", bound=Shaped)


@jax.tree_util.register_pytree_with_keys_class
class Inputs(Mapping[str, ArrayT], Generic[ArrayT]):
    """An immutable mapping from names to arrays, which knows the logical axes of each array.

    Args:
        arrays: numpy, jax or abstract arrays by name, each with the axis `batch` first.
        axes: logical axes by name, for arrays whose axes are not in `AXES`.

    Raises:
        ConfigError: an array has a different number of axes than declared.
    """

    __slots__ = ("_arrays", "_axes")

    def __init__(
        self, arrays: Mapping[str, ArrayT], axes: Mapping[str, LogicalAxes] | None = None
    ) -> None:
        named_arrays = dict(arrays.items())
        declared_axes = {**(arrays.declared if isinstance(arrays, Inputs) else {}), **(axes or {})}
        self._arrays = named_arrays
        self._axes = {name: value for name, value in declared_axes.items() if name in named_arrays}
        for name, array in named_arrays.items():
            shape = tuple(getattr(array, "shape", ()))
            declared = self._axes.get(name, get_logical_axes(name, len(shape)))
            if declared is not None and len(shape) != len(declared):
                raise ConfigError(
                    f"{name} has shape {shape}, but its axes are {declared}: give one "
                    "size for each axis"
                )

    def __getitem__(self, name: str) -> ArrayT:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(a.shape)}" for name, a in self._arrays.items())
        return f"Inputs({shapes})"

    @property
    def declared(self) -> Mapping[str, LogicalAxes]:
        """The axes that were passed to the constructor, by name."""
        return self._axes

    def get_logical_axes(self, name: str) -> LogicalAxes:
        """Return the logical axes of an array."""
        rank = len(self._arrays[name].shape)
        return (
            self._axes.get(name) or get_logical_axes(name, rank) or ("batch", *[None] * (rank - 1))
        )

    def select(self, names: Iterable[str]) -> Inputs[ArrayT]:
        """Return the arrays with these names; names without an array are ignored."""
        return Inputs({n: self._arrays[n] for n in names if n in self._arrays}, self._axes)

    def replace(self, **arrays: ArrayT) -> Inputs[ArrayT]:
        """Return a copy in which some arrays are added or replaced."""
        return Inputs({**self._arrays, **arrays}, self._axes)

    def tree_flatten_with_keys(self):
        names = tuple(self._arrays)
        keys = tuple((jax.tree_util.DictKey(name), self._arrays[name]) for name in names)
        return keys, (names, tuple(sorted(self._axes.items())))

    def tree_flatten(self):
        names = tuple(self._arrays)
        return tuple(self._arrays.values()), (names, tuple(sorted(self._axes.items())))

    @classmethod
    def tree_unflatten(cls, aux, arrays) -> Inputs:
        names, axes = aux
        new = object.__new__(cls)
        new._arrays, new._axes = dict(zip(names, arrays, strict=True)), dict(axes)
        return new


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """The output of an encoder: a modality tower, or the encoder of an encoder-decoder.

    Attributes:
        embeddings: [b, t, d].
        segment_ids: [b, t]; 0 = padding. Decoder tokens attend to positions of their own segment.
    """

    embeddings: Float[Array, "b t d"]
    segment_ids: Int[Array, "b t"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """Embeddings that replace the embeddings of placeholder tokens.

    Attributes:
        values: [b, n, d], or [b, n, m * d] with further features that the first m - 1 layers add
            to their outputs (Qwen3-VL).
        index: [b, s], index into the `values` of the row; -1 keeps the embedding of the token.
    """

    values: Float[Array, "b n _"]
    index: Int[Array, "b s"]

    @classmethod
    def at(cls, values: Float[Array, "b n d"], placeholders: Bool[Array, "b s"]) -> Features:
        """Assign features to placeholder tokens in order: the k-th placeholder gets feature k."""
        order = jnp.cumsum(placeholders, axis=1, dtype=jnp.int32) - 1
        return cls(values, jnp.where(placeholders, order, -1))

    def insert(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Return token embeddings [b, s, d] in which features replace the placeholders."""
        return self._by_token(self.values[..., : x.shape[-1]], x)

    def get_layer_features(self, x: Float[Array, "b s d"]) -> Float[Array, "l b s d"] | None:
        """Return the features that layers add to their outputs; 0 for other tokens. None = none.

        Args:
            x: token embeddings, for their size and dtype.
        """
        width = x.shape[-1]
        if self.values.shape[-1] == width:
            return None
        features = self._by_token(self.values[..., width:], jnp.zeros((), x.dtype))
        return jnp.moveaxis(features.reshape(*features.shape[:2], -1, width), 2, 0)

    def _by_token(self, values: Float[Array, "b n e"], fill_values: Array) -> Float[Array, "b s e"]:
        """Return the value of each placeholder token, and `fill_values` for other tokens."""
        index = jnp.maximum(self.index, 0)[..., None]
        features = jnp.take_along_axis(values.astype(fill_values.dtype), index, axis=1)
        return jnp.where((self.index >= 0)[..., None], features, fill_values)
