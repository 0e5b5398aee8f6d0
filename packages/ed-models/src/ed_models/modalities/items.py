"""The items of a model's encoder, such as images or recordings, and the record of their layout.

Legend: b rows, s tokens of a prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import AXES, OTHER_FORMS, Inputs
from flax import nnx
from jaxtyping import Bool, Int

from ed_models.protocol import LanguageModel

ItemArrays = Mapping[str, np.ndarray]
#: Maximum number of tokens of a sequence, if nothing limits the number.
NO_LIMIT = 2**31 - 1


class PlacedItem(Protocol):
    """An item and its placeholder tokens in a prompt."""

    @property
    def arrays(self) -> ItemArrays:
        """The arrays of the item."""
        ...

    @property
    def start(self) -> int:
        """Position of the first placeholder token."""
        ...

    @property
    def length(self) -> int:
        """Number of placeholder tokens."""
        ...


class EncoderItems(ABC):
    """The arrays of the items of one model's encoder.

    Args:
        measure: returns `longest` and `features`; called when one of them is read.

    Attributes:
        names: names of the arrays.
        has_axes: whether tokens have rotary positions along time, height and width.
    """

    names: tuple[str, ...]
    has_axes: bool = False

    def __init__(self, measure: Callable[[], tuple[int, int]]) -> None:
        self._measure = measure

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        return self._measure()

    @property
    def longest(self) -> int:
        """Maximum number of encoder positions of an item."""
        return self._sizes[0]

    @property
    def features(self) -> int:
        """Size of the output of an encoder position."""
        return self._sizes[1]

    @abstractmethod
    def examples(self) -> list[ItemArrays]:
        """Return items of all shapes for which the encoder is compiled, filled with zeros."""

    @abstractmethod
    def pad_item(self, arrays: ItemArrays) -> ItemArrays:
        """Return the arrays of an item in one of the shapes of `examples`."""

    @abstractmethod
    def check(self, item: PlacedItem) -> str | None:
        """Return how an item contradicts its placeholder tokens; None = not at all."""

    @abstractmethod
    def split_items(self, row: ItemArrays) -> Iterator[tuple[ItemArrays, int]]:
        """Yield the items in the arrays of a row of a batch, and the numbers of their features.

        Arrays of a fixed number of features may be followed by items of padding.
        """

    def count(self, arrays: ItemArrays) -> int:
        """Return the number of encoder positions of arrays in a shape of `examples`."""
        return self.longest

    def gaps(self, arrays: ItemArrays) -> tuple[int, ...]:
        """Return the offsets of other tokens between the placeholder tokens of an item."""
        return ()

    def positions(self, count: int, items: Sequence[PlacedItem]) -> Int[np.ndarray, "3 s"] | None:
        """Return the rotary positions of a prompt; None = the numbers of its tokens.

        Args:
            count: number of tokens of the prompt.
            items: the items in order.
        """
        return None

    def batch_rows(
        self, placeholders: Bool[np.ndarray, "b s"], arrays: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the arrays of a processor of transformers with a row for each prompt.

        Args:
            placeholders: which tokens of the prompts are features.
            arrays: arrays by name. Arrays with a row for each prompt, and arrays of other names,
                are returned unchanged.

        Raises:
            ConfigError: the numbers of features and of placeholder tokens differ.
        """
        return arrays


class Modality(NamedTuple):
    """What a language model reads besides text: a layout of images or recordings.

    Attributes:
        name: the layout, for messages and tests.
        noun: the media in messages.
        token: field of the configuration with the id of the placeholder token of a feature.
        names: arrays of a model call; the first contains the media.
        build: returns the items of a model, for a maximum number of tokens of a sequence.
        features: array of outputs of the encoder, which a call accepts instead of media.
        convertible: further arrays of processors of transformers, which `batch_rows` converts.
        unread: arrays of these processors that describe tokens or rows, and that no call reads.
        video_token: field of the configuration with the id of the placeholder token of a feature
            of a video; None = the model reads no videos.
    """

    name: str
    noun: str
    token: str
    names: tuple[str, ...]
    build: Callable[[LanguageModel, int], EncoderItems]
    features: str | None = None
    convertible: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    video_token: str | None = None

    @property
    def main_names(self) -> tuple[str, ...]:
        """Names of the media and of their features, of which a model call has one."""
        return self.names[:1] if self.features is None else (self.names[0], self.features)

    @property
    def call_names(self) -> tuple[str, ...]:
        """Names of the arrays that a model call accepts."""
        return *self.main_names, *self.names[1:]


def build_encoder_items(model: LanguageModel, max_model_len: int = NO_LIMIT) -> EncoderItems | None:
    """Return the items of a model's encoder; None for a model that reads only text.

    Args:
        model: the served model.
        max_model_len: maximum number of tokens of a sequence.
    """
    modality = get_modality(model)
    return None if modality is None else modality.build(model, max_model_len)


def get_modality(model: LanguageModel) -> Modality | None:
    """Return what a model reads besides text; None for a model that reads only text."""
    return getattr(model, "modality", None)


class FixedItems(EncoderItems):
    """Items of one size: images, tiles, or spectrograms of parts of recordings.

    Args:
        model: the model, whose encoder determines the number of features.
        example: an item of zeros.
    """

    def __init__(self, model: LanguageModel, example: ItemArrays) -> None:
        super().__init__(self._measure_item)
        self.names, self._model, self._example = tuple(example), model, example

    def _measure_item(self) -> tuple[int, int]:
        """Return the sizes without devices, so nothing is computed."""
        graphdef, state = nnx.split(cast(nnx.Module, self._model))
        inputs = batch_of_one(self._example)

        def encode(state: nnx.State) -> jax.Array:
            return cast(LanguageModel, nnx.merge(graphdef, state)).encode(inputs).embeddings

        _, longest, features = jax.eval_shape(encode, state).shape
        return longest, features

    def examples(self) -> list[ItemArrays]:
        """See `EncoderItems.examples`."""
        return [self._example]

    def pad_item(self, arrays: ItemArrays) -> ItemArrays:
        """Return the arrays; an item without a mask has no padding."""
        return {**self._example, **arrays}

    def count_features(self, arrays: ItemArrays) -> int:
        """Return the number of features of an item."""
        return self.longest

    def check(self, item: PlacedItem) -> str | None:
        """See `EncoderItems.check`."""
        length = self.count_features(item.arrays)
        if item.length == length:
            return None
        return (
            f"the encoder returns {length} positions, but the item has {item.length} "
            "placeholder tokens: repeat the placeholder token for each position"
        )

    def split_items(self, row: ItemArrays) -> Iterator[tuple[ItemArrays, int]]:
        """See `EncoderItems.split_items`."""
        for number in range(len(row[self.names[0]])):
            arrays = {name: row[name][number] for name in self.names}
            if length := self.count_features(arrays):
                yield arrays, length


def used_items(
    items: EncoderItems, row: ItemArrays, count: int, tokens: Collection[int]
) -> list[tuple[ItemArrays, int]]:
    """Return the items of a row of a batch, and the numbers of their features.

    Args:
        items: the items of the model.
        row: arrays of the items, padded with zeros.
        count: number of placeholder tokens of the row; items after them are padding.
        tokens: the placeholder tokens, for the message.

    Raises:
        ConfigError: the numbers of placeholder tokens and of features differ.
    """
    real_items: list[tuple[ItemArrays, int]] = []
    used = 0
    for arrays, length in items.split_items(row):
        if used >= count:
            break
        real_items.append((arrays, length))
        used += length
    if used != count:
        raise ConfigError(
            f"a row has {count} placeholder tokens {sorted(tokens)}, but its items have {used} "
            "features: use the processor of the checkpoint"
        )
    return real_items


def batch_of_one(arrays: ItemArrays) -> Inputs:
    """Return the arrays of an item as the inputs of one row with one item."""
    inputs = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        forms = [axes for axes in (OTHER_FORMS.get(name), AXES.get(name)) if axes is not None]
        rank = next((len(axes) for axes in forms if len(axes) > array.ndim), array.ndim + 1)
        inputs[name] = array.reshape((1,) * (rank - array.ndim) + array.shape)
    return Inputs(inputs)
