"""Ordered rules over the names of parameters: `pattern -> value`, the first match decides.

One dialect for all that is said about parameters by name: sharding, weight decay, learning rates,
what is trained, LoRA targets, quantization. A pattern is a regular expression that is searched in
the canonical name of each layer's parameter (`model.layers.3.self_attn.q_proj.kernel`, its parts
joined by `.` or `/`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from ed_infra import paths
from ed_infra.errors import ConfigError, did_you_mean

V = TypeVar("V")


class Rules(Generic[V]):
    """Rules of one kind; each must match something in the end.

    Args:
        rules: (pattern, value) pairs, in order.
        kind: what a rule is called in messages (`"sharding rule"`).

    Raises:
        ConfigError: a pattern is no regular expression.
    """

    def __init__(self, rules: Iterable[tuple[str, V]], *, kind: str):
        self.kind = kind
        self._rules: list[tuple[str, re.Pattern[str], V]] = []
        for pattern, value in rules:
            try:
                self._rules.append((pattern, re.compile(pattern), value))
            except re.error as error:
                raise ConfigError(f"{kind} {pattern!r} is not a pattern: {error}") from None
        self._used: set[int] = set()
        self._seen: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._rules)

    def match(self, name: str) -> tuple[str, V] | None:
        """Return the pattern and value of the first rule that matches a canonical name."""
        self._seen.append(name)
        slashed = name.replace(".", "/")
        # Two rules may match; both count as used, the first decides.
        hits = [
            i
            for i, (_, regex, _) in enumerate(self._rules)
            if regex.search(slashed) or regex.search(name)
        ]
        self._used.update(hits)
        return (self._rules[hits[0]][0], self._rules[hits[0]][2]) if hits else None

    def at(self, path: Sequence[Any], default: Any = None) -> V | Any:
        """Return the value for the variable stored at a path; `default` where no rule matches.

        Raises:
            ConfigError: the rules differ between layers that are stored as one array.
        """
        names = paths.canonical(path)
        found = [self.match(name) for name in names]
        for name, hit in zip(names, found, strict=True):
            if (hit and hit[1]) != (found[0] and found[0][1]):
                first = found[0][0] if found[0] else "no rule"
                other = hit[0] if hit else "no rule"
                raise ConfigError(
                    f"{self.kind}s give {names[0]} {first!r} and {name} {other!r}, but these "
                    "layers are one stacked array: write one rule for both, or set "
                    "scan_layers: false"
                )
        return default if found[0] is None else found[0][1]

    def check_used(self) -> None:
        """Raise ConfigError for a rule that has matched nothing, with the nearest name."""
        for i, (pattern, _, _) in enumerate(self._rules):
            if i not in self._used:
                example = self._seen[0] if self._seen else "(there are no parameters)"
                raise ConfigError(
                    f"{self.kind} {pattern!r} matches no parameter"
                    f"{did_you_mean(pattern, self._seen)}. Names look like {example}"
                )
