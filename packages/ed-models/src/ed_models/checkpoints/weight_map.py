"""A family's weight table, applied to the tensors that one model has: slices in, tensors out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, takewhile

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError

from ed_models.checkpoints.tensor_files import Index, is_finite
from ed_models.weights.blocks import ArchitectureFields, Piece, Shape, Shapes, positions_between
from ed_models.weights.rules import Rule, untouched

_MOST_THREADS = 8
_OF_A_THREAD = 2**22  # bytes that are worth a thread
_IN_CACHE = 2**22  # bytes that the processor keeps in its cache while it transposes them


class WeightMap:
    """The rules, applied to the tensors that one model has.

    Args:
        rules: a family's table.
        shapes: canonical name -> shape of one layer's tensor.
        config: of the model; rules may ask for the number of heads.

    Attributes:
        hf_shapes: the tensors that a checkpoint of this model holds.
        by_ours, by_hf: the blocks that make up one tensor.

    Raises:
        ConfigError: no rule fits a parameter, two rules write one tensor, or a rule does not fit
            the shapes.
    """

    def __init__(
        self, rules: Sequence[Rule], shapes: Shapes, config: ArchitectureFields | None = None
    ):
        self.shapes = dict(shapes)
        self.config = config
        self.hf_shapes: dict[str, Shape] = {}
        self.by_ours: dict[str, list[Piece]] = {}
        self.by_hf: dict[str, list[Piece]] = {}
        compiled = [(rule, [_pattern(p) for p in _names(rule)]) for rule in rules]
        unread = [(_pattern(rule.hf), rule.layout) for rule, names in compiled if not names]
        self._ignored = [pattern for pattern, _ in unread]
        self._copied = [pattern for pattern, layout in unread if layout is untouched]
        for name in shapes:
            if name not in self.by_ours:
                self._add(name, compiled)

    def _add(self, name: str, rules: list[tuple[Rule, list[re.Pattern[str]]]]) -> None:
        for rule, patterns in rules:
            match = next(filter(None, (p.fullmatch(name) for p in patterns)), None)
            if match is None:
                continue
            bound = match.groupdict()
            group = [pattern.format(**bound) for pattern in _names(rule)]
            if all(n in self.shapes for n in group):
                self._apply(rule, {n: self.shapes[n] for n in group}, bound)
                return
        raise ConfigError(f"no weight rule fits the parameter {name!r}; add one to WEIGHTS")

    def _apply(self, rule: Rule, ours: Mapping[str, Shape], bound: Mapping[str, str]) -> None:
        def hf(**more: object) -> str:
            try:
                return rule.hf.format(**bound, **more)
            except KeyError as error:
                raise ConfigError(
                    f"the weight rule for {rule.hf!r} contains {{{error.args[0]}}}, which has no "
                    f"value; {rule.ours!r} has {{{'}, {'.join(bound)}}}"
                ) from None

        relation = rule.layout(ours, hf, self.config)
        for clash in self.hf_shapes.keys() & relation.hf_shapes.keys():
            raise ConfigError(f"two weight rules write {clash!r}; the second: {rule}")
        self.hf_shapes |= relation.hf_shapes
        for piece in relation.pieces:
            self.by_ours.setdefault(piece.ours, []).append(piece)
            self.by_hf.setdefault(piece.hf, []).append(piece)

    def ignores(self, hf_name: str) -> bool:
        """Whether a tensor that the model has not is known to be needless."""
        return any(pattern.fullmatch(hf_name) for pattern in self._ignored)

    def copies(self, hf_name: str) -> bool:
        """Whether a tensor that the model has not belongs to a part that is copied unchanged."""
        return any(pattern.fullmatch(hf_name) for pattern in self._copied)

    def load(
        self,
        name: str,
        window: Sequence[range],
        read: Callable[[str, Index], np.ndarray],
        out: np.ndarray,
        *,
        check_finite: bool = False,
    ) -> None:
        """Fill `out` with `ours[name][window]`, cast to its dtype.

        Args:
            window: the wanted positions of each dimension, with step 1.
            read: `(hf name, index) -> values`; called only for the entries that the window needs.
            out: array of the window's shape.
            check_finite: refuse values that are NaN or infinite after the cast.

        Raises:
            CheckpointError: A value is not finite.
        """
        for piece, part in fill_window(self.by_ours[name], window, read, out):
            if check_finite and not is_finite(part):
                raise CheckpointError(
                    f"tensor {piece.hf!r} has NaN or infinite numbers in {out.dtype}: download "
                    "the file again, or load in a dtype with a larger range; "
                    "check_finite=False loads the tensor unchanged"
                )

    def save(self, hf_name: str, read: Callable[[str, tuple[int, ...]], np.ndarray]) -> np.ndarray:
        """Return the Hugging Face tensor.

        Args:
            read: `(our name, leading positions) -> values`: one expert of many, or the whole.
        """
        values: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        out = None
        for piece in self.by_hf[hf_name]:
            at = tuple(takewhile(lambda r: isinstance(r, int), piece.our_region))
            if (piece.ours, at) not in values:
                values[piece.ours, at] = read(piece.ours, at)  # type: ignore[arg-type]
            block = values[piece.ours, at][_index(piece.our_region[len(at) :])]  # type: ignore[index]
            block = block.transpose(np.argsort(piece.perm))
            if block.shape == self.hf_shapes[hf_name] and block.flags.c_contiguous:
                return block
            if out is None:
                out = np.zeros(self.hf_shapes[hf_name], block.dtype)
            copy_array(out[(*_index(piece.hf_region), ...)], block)
        assert out is not None
        return out


def fill_window(
    pieces: Iterable[Piece],
    window: Sequence[range],
    read: Callable[[str, Index], np.ndarray],
    out: np.ndarray,
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Fill `out` with a window of the tensor of ours that consists of the blocks.

    Args:
        window, read, out: see `WeightMap.load`.

    Yields:
        Each block that the window needs, and its part of `out`, which is filled.
    """
    for piece in pieces:
        hit = _intersect(piece, window)
        if hit is not None:
            target, source = hit
            part = out[(*target, ...)]
            copy_array(part, read(piece.hf, source).transpose(piece.perm))
            yield piece, part


def copy_array(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, converted; several times faster for transposed matrices.

    Large arrays are copied in parts, by several threads.
    """
    if source.dtype == target.dtype:  # the same bits: numpy copies integers without its lock
        bits = f"u{target.dtype.itemsize}"
        target, source = target.view(bits), source.view(bits)
    parts = min(os.cpu_count() or 1, _MOST_THREADS, source.nbytes // _OF_A_THREAD)
    if parts < 2:
        _copy(target, source)
        return
    axis = source.ndim - 1 if _is_transposed(source) else 0
    cuts = [source.shape[axis] * i // parts for i in range(parts + 1)]
    leading_slices = (slice(None),) * axis
    with ThreadPoolExecutor(parts) as pool:
        windows = [(*leading_slices, slice(*ends)) for ends in pairwise(cuts)]
        list(pool.map(lambda at: _copy(target[at], source[at]), windows))


def _is_transposed(source: np.ndarray) -> bool:
    return source.ndim > 1 and abs(source.strides[-1]) > abs(source.strides[-2])


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy 16 columns of a transposed matrix at a time: reads are contiguous, and each write
    fills a cache line. Types that numpy knows only through ml_dtypes are moved as integers of
    their size.
    """
    if not _is_transposed(source) or source.nbytes <= _IN_CACHE:
        target[...] = source
        return
    bits = f"u{target.dtype.itemsize}"
    for start in range(0, source.shape[-1], 16):
        band = source[..., start : start + 16]
        if band.dtype != target.dtype:
            band = band.swapaxes(-1, -2).astype(target.dtype).swapaxes(-1, -2)
        target.view(bits)[..., start : start + 16] = band.view(bits)


def get_index_ranges(index: Sequence[slice], shape: Shape) -> list[range]:
    """Turn a shard's index (`slice(None)`, `slice(0, 4)`, ...) into positions of each dimension."""
    return [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]


def _intersect(piece: Piece, window: Sequence[range]) -> tuple[Index, Index] | None:
    """Return `(index into the window, index into their tensor)`, or None if they do not overlap."""
    target: list[int | slice] = []
    source = list(_index(piece.hf_region))
    kept_dims = iter(piece.perm)  # their dimension of each of ours that the block keeps
    for region, want in zip(piece.our_region, window, strict=True):
        if isinstance(region, int):
            if region not in want:
                return None
            target.append(region - want.start)
            continue
        entries = positions_between(region, want.start, want.stop)
        part = region[entries]
        if not part:
            return None
        target.append(slice(part[0] - want.start, part[-1] - want.start + 1, part.step))
        dim = next(kept_dims)
        source[dim] = _slice(piece.hf_region[dim][entries])
    return tuple(target), tuple(source)


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop, positions.step)


def _index(region: Sequence[int | range]) -> Index:
    return tuple(r if isinstance(r, int) else _slice(r) for r in region)


def _names(rule: Rule) -> tuple[str, ...]:
    return (rule.ours,) if isinstance(rule.ours, str) else rule.ours


def _pattern(text: str) -> re.Pattern[str]:
    """Compile `{path}.kernel` to a regular expression with one named group for each placeholder."""
    parts = re.split(r"\{(\w+)\}", text)
    regex = "".join(f"(?P<{p}>.+)" if i % 2 else re.escape(p) for i, p in enumerate(parts))
    return re.compile(regex)
