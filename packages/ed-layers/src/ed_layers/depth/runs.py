"""Splits the layers of a model into repeating runs that are scanned together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ed_infra.parameter_names import Run


def runs_of(kinds: Sequence[Hashable]) -> tuple[Run, ...]:
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
                bodies, count, rest = best[start + run.count]
                options.append((bodies + period, count + 1, (run, *rest)))
        best[start] = min(options, key=lambda option: (option[0], option[1], -option[2][0].count))
    return best[0][2]
