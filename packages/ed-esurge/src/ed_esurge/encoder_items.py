"""The items of a model's encoder in a prompt of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from ed_infra.errors import ConfigError
from ed_models.modalities.items import EncoderItems, ItemArrays, used_items

from ed_esurge.core.commands import EncoderInput


def placed_items(
    items: EncoderItems, row: ItemArrays, ids: Sequence[int], token: int
) -> tuple[EncoderInput, ...]:
    """Return the items of a prompt from the arrays of a row of a batch.

    Args:
        items: the items of the model.
        row: arrays of the images of the prompt, padded with zeros.
        ids: tokens of the prompt.
        token: the placeholder token of a feature.

    Raises:
        ConfigError: the numbers of placeholder tokens and of features differ.
    """
    places = [place for place, token_id in enumerate(ids) if token_id == token]
    prompt_items: list[EncoderInput] = []
    first = 0
    for arrays, length in used_items(items, row, len(places), token):
        item = EncoderInput.at(arrays, places[first : first + length])
        if item.gaps != items.gaps(arrays):
            raise ConfigError(
                f"item {len(prompt_items)} of the prompt has other tokens between its {length} "
                f"placeholder tokens {token}: use the processor of the checkpoint"
            )
        prompt_items.append(item)
        first += length
    return tuple(prompt_items)
