"""Blocks that our tensors share with those of a checkpoint, and functions that move blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from ed_infra.errors import ConfigError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
#: Returns Hugging Face's name of a tensor; keywords replace parts of the name.
TheirName = Callable[..., str]


class ArchitectureFields(Protocol):
    """A configuration; its attributes are the fields of an architecture, such as `hidden_size`."""

    def __getattribute__(self, name: str, /) -> Any: ...


@dataclass(frozen=True)
class Piece:
    """A block that two tensors share: `hf[hf_region].transpose(perm) == ours[our_region]`.

    A region has an entry for each dimension: its positions, or one position of ours. The block does
    not have our dimensions with one position; the others are `perm` of theirs.
    """

    ours: str
    hf: str
    our_region: tuple[int | range, ...]
    hf_region: tuple[range, ...]
    perm: tuple[int, ...]


class Relation(NamedTuple):
    """The result of a layout: the tensors of the checkpoint, and their blocks."""

    hf_shapes: dict[str, Shape]
    pieces: list[Piece]


def positions_between(region: range, start: int, stop: int) -> slice:
    """Return the entries of an ascending range that are in [start, stop)."""
    low = max(0, -(-(start - region.start) // region.step))
    high = min(len(region), -(-(stop - region.start) // region.step))
    return slice(low, max(low, high))


def lay_out(piece: Piece, axis: int, share: int, period: int, offset: int) -> Iterator[Piece]:
    """Move a block along one dimension of theirs: runs of `share` positions, a run each `period`.

    Position `run * share + i` goes to `run * period + offset + i`.
    """

    def move_piece(entries: slice, to: range) -> Piece:
        kept_ranges = [(d, r) for d, r in enumerate(piece.our_region) if isinstance(r, range)]
        dim, mine = kept_ranges[piece.perm.index(axis)]
        ours, theirs = list(piece.our_region), list(piece.hf_region)
        ours[dim], theirs[axis] = mine[entries], to
        return replace(piece, our_region=tuple(ours), hf_region=tuple(theirs))

    old = piece.hf_region[axis]
    if share == 1:
        step = old.step * period
        first = old.start * period + offset
        yield move_piece(slice(None), range(first, first + len(old) * step, step))
        return
    for run in range(old[0] // share, old[-1] // share + 1):
        entries = positions_between(old, run * share, (run + 1) * share)
        part, by = old[entries], run * (period - share) + offset
        if part:
            yield move_piece(entries, range(part.start + by, part.stop + by, part.step))


def one_tensor(relation: Relation) -> tuple[str, Shape, list[Piece]]:
    """Return the name, the shape and the blocks of the only tensor of the checkpoint.

    Raises:
        ConfigError: there are several.
    """
    if len(relation.hf_shapes) != 1:
        raise ConfigError(
            f"a layout within one tensor cannot use several: {', '.join(relation.hf_shapes)}"
        )
    ((name, shape),) = relation.hf_shapes.items()
    return name, shape, relation.pieces


def resize_shape(shape: Shape, axis: int, size: int) -> Shape:
    """Return the shape with another size along `axis`."""
    return (*shape[: axis % len(shape)], size, *shape[axis % len(shape) + 1 :])
