"""How our parameters lie in Hugging Face checkpoints: a table of rules, read in both directions.

A family states `WEIGHTS`, a sequence of rules `(ours, hf, transform)`; the first rule whose pattern
fits a canonical name holds. `{path}` in a pattern stands for any dotted path:

    Rule("{path}.kernel", "{path}.weight", transpose)

A transform does not touch values. It says which block of which Hugging Face tensor is which block
of ours (`Piece`), so one table serves loading any slice of ours, saving any tensor of theirs, and
checking shapes before a byte is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from ed_infra.errors import ConfigError

Shape = tuple[int, ...]
Region = tuple[int | range, ...]  # per dimension: one position, or several


@dataclass(frozen=True)
class Piece:
    """A block that two tensors share: `hf[hf_region].transpose(perm) == ours[our_region]`.

    Dimensions that a region indexes with an int are gone from the block.
    """

    ours: str
    hf: str
    our_region: Region
    hf_region: Region
    perm: tuple[int, ...]


class Relation(NamedTuple):
    """What a transform answers: the tensors that must be on the other side, and their blocks."""

    hf_shapes: dict[str, Shape]
    pieces: list[Piece]


class Transform(Protocol):
    """Relate our tensors (name -> shape, those that the rule names) to Hugging Face's.

    `hf(**more)` gives the Hugging Face name; `more` fills placeholders that only it has.
    """

    def __call__(self, ours: Mapping[str, Shape], hf: Callable[..., str]) -> Relation: ...


class Rule(NamedTuple):
    """Our name or names, the Hugging Face name, and how the values lie."""

    ours: str | tuple[str, ...]
    hf: str
    transform: Transform


def equal(ours: Mapping[str, Shape], hf: Callable[..., str]) -> Relation:
    """The same tensor under another name."""
    ((name, shape),) = ours.items()
    whole = tuple(range(n) for n in shape)
    piece = Piece(name, hf(), whole, whole, tuple(range(len(shape))))
    return Relation({hf(): shape}, [piece])


def transpose(ours: Mapping[str, Shape], hf: Callable[..., str]) -> Relation:
    """Last two dimensions swapped: our kernels are [.., in, out], torch's weights [.., out, in]."""
    ((name, shape),) = ours.items()
    perm = _swap_last_two(len(shape))
    turned = tuple(shape[p] for p in perm)
    regions = tuple(range(n) for n in shape), tuple(range(n) for n in turned)
    return Relation({hf(): turned}, [Piece(name, hf(), *regions, perm)])


def split(axis: int, then: Transform = transpose) -> Transform:
    """Several of ours lie one after another along `axis` of one of theirs (a fused `qkv_proj`).

    Args:
        axis: dimension of *their* tensor.
        then: how each part lies within its share.
    """

    def relate(ours: Mapping[str, Shape], hf: Callable[..., str]) -> Relation:
        pieces: list[Piece] = []
        total: list[int] = []
        offset = 0
        for name, shape in ours.items():
            part = then({name: shape}, hf)
            ((hf_name, hf_shape),) = part.hf_shapes.items()
            at = axis % len(hf_shape)
            for p in part.pieces:
                pieces.append(_moved(p, at, offset))
            offset += hf_shape[at]
            total = [*hf_shape[:at], offset, *hf_shape[at + 1 :]]
        return Relation({hf_name: tuple(total)}, pieces)

    return relate


def stack(placeholder: str = "expert", then: Transform = transpose) -> Transform:
    """Entry `e` of our leading dimension is their tensor with `{placeholder}` = e (experts)."""

    def relate(ours: Mapping[str, Shape], hf: Callable[..., str]) -> Relation:
        ((name, shape),) = ours.items()
        shapes: dict[str, Shape] = {}
        pieces: list[Piece] = []
        for e in range(shape[0]):
            part = then({name: shape[1:]}, lambda e=e, **more: hf(**{placeholder: e}, **more))
            shapes |= part.hf_shapes
            pieces += [
                Piece(name, p.hf, (e, *p.our_region), p.hf_region, p.perm) for p in part.pieces
            ]
        return Relation(shapes, pieces)

    return relate


STANDARD: tuple[Rule, ...] = (
    Rule("{path}.kernel", "{path}.weight", transpose),
    Rule("{path}.embedding", "{path}.weight", equal),
    Rule("{path}", "{path}", equal),
)

#: Tensors that old checkpoints hold and nobody needs: values that the config determines.
IGNORED: tuple[str, ...] = (r"(^|\.)rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$")


class WeightMap:
    """The rules, applied to the tensors that one model has.

    Args:
        rules: a family's table.
        shapes: canonical name -> shape of one layer's tensor.

    Attributes:
        hf_shapes: the tensors that a checkpoint of this model holds.
        by_ours, by_hf: the blocks that make up one tensor.
    """

    def __init__(self, rules: Sequence[Rule], shapes: Mapping[str, Shape]):
        self.shapes = dict(shapes)
        self.hf_shapes: dict[str, Shape] = {}
        self.by_ours: dict[str, list[Piece]] = {}
        self.by_hf: dict[str, list[Piece]] = {}
        compiled = [(rule, [_pattern(p) for p in _names(rule.ours)]) for rule in rules]
        for name in shapes:
            if name not in self.by_ours:
                self._add(name, compiled)

    def _add(self, name: str, rules: list[tuple[Rule, list[re.Pattern[str]]]]) -> None:
        for rule, patterns in rules:
            match = next(filter(None, (p.fullmatch(name) for p in patterns)), None)
            if match is None:
                continue
            bound = match.groupdict()
            group = [pattern.format(**bound) for pattern in _names(rule.ours)]
            if not all(n in self.shapes for n in group):
                continue
            ours = {n: self.shapes[n] for n in group}
            relation = rule.transform(ours, partial(rule.hf.format, **bound))
            clash = self.hf_shapes.keys() & relation.hf_shapes.keys()
            if clash:
                raise ConfigError(
                    f"two weight rules write {sorted(clash)[0]!r}; the second: {rule}"
                )
            self.hf_shapes |= relation.hf_shapes
            for piece in relation.pieces:
                self.by_ours.setdefault(piece.ours, []).append(piece)
                self.by_hf.setdefault(piece.hf, []).append(piece)
            return
        raise ConfigError(f"no weight rule fits the parameter {name!r}; add one to WEIGHTS")

    def load(
        self,
        name: str,
        window: Sequence[range],
        read: Callable[[str, tuple[int | slice, ...]], np.ndarray],
        out: np.ndarray,
    ) -> None:
        """Fill `out` with `ours[name][window]`, cast to its dtype.

        Args:
            window: the wanted positions of each dimension, with step 1.
            read: `(hf name, index) -> values`; asked only for what the window needs.
            out: array of the window's shape.
        """
        for piece in self.by_ours[name]:
            hit = _intersect(piece, window)
            if hit is not None:
                target, source = hit
                copy(out[(*target, ...)], read(piece.hf, source).transpose(piece.perm))

    def save(self, hf_name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return the Hugging Face tensor, built from `read(our name)`."""
        pieces = self.by_hf[hf_name]
        blocks = [read(p.ours)[_index(p.our_region)].transpose(np.argsort(p.perm)) for p in pieces]
        whole = len(blocks) == 1 and blocks[0].shape == self.hf_shapes[hf_name]
        if whole and blocks[0].flags.c_contiguous:
            return blocks[0]
        out = np.empty(self.hf_shapes[hf_name], blocks[0].dtype)
        for piece, block in zip(pieces, blocks, strict=True):
            copy(out[(*_index(piece.hf_region), ...)], block)
        return out


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, converted; several times faster for transposed matrices.

    Sixteen columns at a time: what is read lies together, and each write fills a cache line. Types
    that numpy knows only through ml_dtypes are moved as integers of their size.
    """
    if source.ndim < 2 or abs(source.strides[-1]) <= abs(source.strides[-2]):
        target[...] = source
        return
    bits = f"u{target.dtype.itemsize}"
    for start in range(0, source.shape[-1], 16):
        band = source[..., start : start + 16].swapaxes(-1, -2).astype(target.dtype)
        columns = target[..., start : start + 16]
        if target.flags.c_contiguous:
            columns = target.view(bits)[..., start : start + 16]
            band = band.view(bits)
        columns[...] = band.swapaxes(-1, -2)


def window_of(index: Sequence[slice], shape: Shape) -> list[range]:
    """Turn a shard's index (`slice(None)`, `slice(0, 4)`, ...) into positions of each dimension."""
    return [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]


def _intersect(piece: Piece, window: Sequence[range]):
    """Return `(index into the window, index into their tensor)`, or None: they do not meet."""
    target: list[int | slice] = []
    taken: list[range] = []  # positions within the block, per dimension of ours that it keeps
    for region, want in zip(piece.our_region, window, strict=True):
        if isinstance(region, int):
            if region not in want:
                return None
            target.append(region - want.start)
            continue
        low = max(0, math.ceil((want.start - region.start) / region.step))
        high = min(len(region), math.ceil((want.stop - region.start) / region.step))
        if low >= high:
            return None
        taken.append(range(low, high))
        first = region[low] - want.start
        target.append(slice(first, region[high - 1] - want.start + 1, region.step))
    # Dimension d of ours is dimension perm[d] of the block as it lies in their tensor.
    of_block = dict(zip(piece.perm, taken, strict=True))
    source: list[int | slice] = []
    dim = 0
    for region in piece.hf_region:
        if isinstance(region, int):
            source.append(region)
            continue
        source.append(_slice(region[of_block[dim].start : of_block[dim].stop]))
        dim += 1
    return tuple(target), tuple(source)


def _moved(piece: Piece, axis: int, offset: int) -> Piece:
    """Shift the block by `offset` along one dimension of their tensor."""
    region = list(piece.hf_region)
    old = region[axis]
    if isinstance(old, int):
        region[axis] = old + offset
    else:
        region[axis] = range(old.start + offset, old.stop + offset, old.step)
    return Piece(piece.ours, piece.hf, piece.our_region, tuple(region), piece.perm)


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop, positions.step)


def _index(region: Region) -> tuple[int | slice, ...]:
    return tuple(r if isinstance(r, int) else _slice(r) for r in region)


def _swap_last_two(rank: int) -> tuple[int, ...]:
    if rank < 2:
        raise ConfigError(f"a transposed weight has at least two dimensions, not {rank}")
    return (*range(rank - 2), rank - 1, rank - 2)


def _names(ours: str | Iterable[str]) -> tuple[str, ...]:
    return (ours,) if isinstance(ours, str) else tuple(ours)


def _pattern(text: str) -> re.Pattern[str]:
    """Compile `{path}.kernel` to a regular expression with one named group for each placeholder."""
    parts = re.split(r"\{(\w+)\}", text)
    regex = "".join(f"(?P<{p}>.+)" if i % 2 else re.escape(p) for i, p in enumerate(parts))
    return re.compile(regex)
