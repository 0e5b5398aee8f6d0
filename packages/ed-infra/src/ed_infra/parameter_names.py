"""Storage paths and canonical names of parameters. Imports neither jax nor flax.

A parameter has one canonical name for each layer, whatever the storage:
`model.layers.3.self_attn.q_proj.kernel`. A `Stack` stores layers in one of two ways:

- stacked: a run of `n` layers from layer `start`, repeating with `period`, is the attribute
  `run_{start}_{n}_{period}`, a list of `period` layers. Each leaf has a leading dimension of
  `n // period`: entry `j` of the leaf under index `i` is layer `start + i + j * period`.
- unrolled: layer `i` is the attribute `layer_{i}`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

_RUN = re.compile(r"run_(\d+)_(\d+)_(\d+)")
_LAYER = re.compile(r"layer_(\d+)")
# nnx wraps a value in a variable; flattening to arrays puts one of these attribute names before the
# parts of the value: those of a quantized matrix; a plain array has none.
_LEAF_ATTRIBUTES = frozenset({"value", "raw_value"})


class Run(NamedTuple):
    """A run of equal layers, stored stacked."""

    start: int
    length: int
    period: int

    @property
    def name(self) -> str:
        """Attribute under which a `Stack` stores the run."""
        return f"run_{self.start}_{self.length}_{self.period}"

    @property
    def repeats(self) -> int:
        """Number of periods: the leading dimension of each leaf."""
        return self.length // self.period

    def layers(self, index: int) -> list[int]:
        """Return the layers of list entry `index`, in the order of the leading dimension."""
        return [self.start + index + j * self.period for j in range(self.repeats)]


def split_runs(kinds: Sequence[Hashable]) -> tuple[Run, ...]:
    """Split the layers into runs with the fewest compiled layer bodies, then the fewest runs.

    Args:
        kinds: one value per layer; layers with the same value have the same structure.

    Returns:
        The runs in order; a period longer than one layer occurs at least twice.

    >>> [tuple(run) for run in runs_of("WWWWWF" * 4 + "WW")]  # Gemma 3: five windowed, one full
    [(0, 24, 6), (24, 2, 1)]
    >>> [tuple(run) for run in runs_of("D" + "M" * 26)]  # DeepSeek: a dense layer, then experts
    [(0, 1, 1), (1, 26, 1)]
    """
    n = len(kinds)
    # best[i]: (bodies, number of runs, runs) for the layers from i to the last.
    best: list[tuple[int, int, tuple[Run, ...]]] = [(0, 0, ())] * (n + 1)
    for start in reversed(range(n)):
        options = []
        for period in range(1, max((n - start) // 2, 1) + 1):
            equal = 0
            while (
                start + equal + period < n and kinds[start + equal] == kinds[start + equal + period]
            ):
                equal += 1
            for repeats in range(1 if period == 1 else 2, equal // period + 2):
                run = Run(start, repeats * period, period)
                bodies, count, later_runs = best[start + run.length]
                options.append((bodies + period, count + 1, (run, *later_runs)))
        best[start] = min(options, key=lambda option: (option[0], option[1], -option[2][0].length))
    return best[0][2]


def parse_run(name: object) -> Run | None:
    """Parse the attribute name of a run, or return None."""
    match = _RUN.fullmatch(str(name))
    return Run(*(int(g) for g in match.groups())) if match else None


def normalize_parameter_name(path: Iterable[object]) -> tuple[str | int, ...]:
    """Convert a path of nnx or `jax.tree_util` keys to strings and integers."""
    parts: list[str | int] = []
    for key in path:
        attribute = False
        for field in ("key", "idx", "name"):
            inner = getattr(key, field, None)
            if isinstance(inner, str | int):
                attribute = field == "name"
                key = inner
                break
        if not attribute or key not in _LEAF_ATTRIBUTES:
            parts.append(key if isinstance(key, int) else str(key))
    return tuple(parts)


def is_stacked(path: Iterable[object]) -> bool:
    """Return whether a leaf at this storage path has a leading layer dimension."""
    return any(parse_run(key) for key in normalize_parameter_name(path))


def canonical(path: Iterable[object]) -> list[str]:
    """Return the canonical names of a leaf, one for each layer that it stores.

    For a stacked leaf the order is that of its leading dimension; otherwise there is one name.

    >>> canonical(("model", "layers", "run_0_4_2", 1, "mlp", "up_proj", "kernel"))
    ['model.layers.1.mlp.up_proj.kernel', 'model.layers.3.mlp.up_proj.kernel']
    """
    pieces: list[list[str]] = []
    keys = iter(normalize_parameter_name(path))
    for key in keys:
        run = parse_run(key)
        layer = _LAYER.fullmatch(str(key))
        if run is not None:
            index = next(keys, None)
            if not isinstance(index, int) and not str(index).isdigit():
                raise ValueError(f"a run is followed by the index of a layer, not by {index!r}")
            pieces.append([str(i) for i in run.layers(int(str(index)))])
        elif layer is not None:
            pieces.append([layer.group(1)])
        else:
            pieces.append([str(key)])
    return [".".join(names) for names in itertools.product(*pieces)]
