"""The items of a model's encoder, such as images or recordings (`ed_models.tasks.item_kinds`).

Legend: s tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import AXES, IMAGE_FEATURES, OTHER_FORMS, Inputs
from jaxtyping import Int

from ed_models.protocol import LanguageModel

ItemArrays = Mapping[str, np.ndarray]
#: Arrays of `input_names` that describe tokens, and the outputs of an encoder.
_NO_INPUTS = {
    *("input_ids", "attention_mask", "segment_ids", "position_ids", "token_type_ids"),
    IMAGE_FEATURES,
}


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


class EncoderItems(Protocol):
    """The arrays of the items of one model's encoder.

    Attributes:
        names: names of the arrays.
        longest: maximum number of encoder positions of an item.
        features: size of the output of an encoder position.
        has_axes: whether tokens have rotary positions along time, height and width.
    """

    names: tuple[str, ...]
    longest: int
    features: int
    has_axes: bool

    def examples(self) -> list[ItemArrays]:
        """Return items of all shapes for which the encoder is compiled, filled with zeros."""
        ...

    def pad_item(self, arrays: ItemArrays) -> ItemArrays:
        """Return the arrays of an item in one of the shapes of `examples`."""
        ...

    def count(self, arrays: ItemArrays) -> int:
        """Return the number of encoder positions of arrays in a shape of `examples`."""
        ...

    def check(self, item: PlacedItem) -> str | None:
        """Return how an item contradicts its placeholder tokens; None = not at all."""
        ...

    def gaps(self, arrays: ItemArrays) -> tuple[int, ...]:
        """Return the offsets of other tokens between the placeholder tokens of an item."""
        ...

    def split_items(self, row: ItemArrays) -> Iterator[tuple[ItemArrays, int]]:
        """Yield the items in the arrays of a row of a batch, and the numbers of their features.

        Arrays of a fixed number of features may be followed by items of padding.
        """
        ...

    def positions(self, count: int, items: Sequence[PlacedItem]) -> Int[np.ndarray, "3 s"] | None:
        """Return the rotary positions of a prompt; None = the numbers of its tokens.

        Args:
            count: number of tokens of the prompt.
            items: the items in order.
        """
        ...


def encoder_names(model: LanguageModel) -> tuple[str, ...]:
    """Return the names of the arrays that the model's encoder accepts, such as `pixel_values`; ()
    without an encoder."""
    return tuple(
        name
        for name in model.input_names
        if name not in _NO_INPUTS and not name.startswith("decoder_")
    )


def used_items(
    items: EncoderItems, row: ItemArrays, count: int, token: int
) -> list[tuple[ItemArrays, int]]:
    """Return the items of a row of a batch, and the numbers of their features.

    Args:
        items: the items of the model.
        row: arrays of the items, padded with zeros.
        count: number of placeholder tokens of the row; items after them are padding.
        token: the placeholder token, for the message.

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
            f"a row has {count} placeholder tokens {token}, but its items have {used} features: "
            "use the processor of the checkpoint"
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
