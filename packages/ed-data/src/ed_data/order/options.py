"""The order of documents that the options of a mixture describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ed_data.config import Mixture
from ed_data.order.mixing import DocumentOrder, Shares
from ed_data.order.schedule import ScheduledOrder, ScheduledShares, WeightSchedule

#: Number of documents of a stream's block without block_mixture.
_WHOLE = 2**16


def document_order(
    mixture: Mixture,
    labels: Sequence[str],
    sizes: Sequence[int],
    split: str,
    seed: int,
    shuffle: bool,
) -> DocumentOrder:
    """Return the order of documents whose number is known.

    Args:
        mixture: the options.
        labels: names of the informs.
        sizes: number of documents of each inform.
        split: only the split `"train"` uses the weights.
        seed: seed of the order.
        shuffle: False keeps the order of each inform.
    """
    weights = get_weights(mixture, split)
    block = mixture.mixture_block_size if mixture.block_mixture else None
    options: dict[str, Any] = {
        "block_size": block,
        "seed": seed,
        "shuffle": shuffle,
        "buffer": mixture.shuffle_buffer_size,
    }
    schedule = build_weight_schedule(mixture, labels, split)
    if schedule is not None:
        return ScheduledOrder(sizes, schedule, **options)
    return DocumentOrder(
        sizes,
        weights=None if weights is None else [weights[label] for label in labels],
        stop_strategy=mixture.stop_strategy,
        **options,
    )


def build_shares(
    mixture: Mixture, labels: Sequence[str], split: str
) -> Shares | ScheduledShares | None:
    """Return the shares of the informs of a stream; None reads each document once."""
    weights = get_weights(mixture, split)
    block = mixture.mixture_block_size if mixture.block_mixture else _WHOLE
    schedule = build_weight_schedule(mixture, labels, split)
    if schedule is not None:
        return ScheduledShares(schedule, block)
    if weights is None:
        return None
    return Shares.from_weights([weights[label] for label in labels], block)


def get_weights(mixture: Mixture, split: str) -> dict[str, float] | None:
    """Return the weights of the informs; evaluation has none and reads each document once."""
    return mixture.weights if split == "train" else None


def build_weight_schedule(
    mixture: Mixture, labels: Sequence[str], split: str
) -> WeightSchedule | None:
    """Return the schedule of the weights; None if they are constant."""
    options, weights = mixture.mixture_schedule, get_weights(mixture, split)
    if options is None or weights is None:
        return None
    points = [weights, *(point.weights for point in options.points)]
    return WeightSchedule(
        options.type,
        (0, *(point.step for point in options.points)),
        tuple(tuple(point[label] for label in labels) for point in points),
    )


def order_details(mixture: Mixture, split: str, seed: int, shuffle: bool) -> dict[str, Any]:
    """Return the options that the order depends on, as JSON values."""
    weights = get_weights(mixture, split)
    details = {
        "seed": seed,
        "shuffle": shuffle,
        "shuffle_buffer_size": mixture.shuffle_buffer_size,
        "mixture_weights": weights,
        "stop_strategy": mixture.stop_strategy if weights is not None else None,
        "mixture_block_size": mixture.mixture_block_size if mixture.block_mixture else None,
    }
    if mixture.mixture_schedule is not None and weights is not None:
        details["mixture_schedule"] = mixture.mixture_schedule.model_dump(mode="json")
    return details
