"""Ordered rules over the names of parameters: `pattern -> value`, the first match decides.

Everything that selects parameters by name uses them: sharding, weight decay, learning rates,
trainable parameters, LoRA targets, quantization. A pattern is a regular expression, searched in the
canonical name of each layer's parameter (`model.layers.3.self_attn.q_proj.kernel`, its parts joined
by `.` or `/`).

    decay = Rules([(r"bias$|norm", 0.0), (".*", 0.1)], kind="weight decay rule")
    decay.match("model.layers.3.self_attn.q_proj.kernel")  # (".*", 0.1)
    rates = decay.tree(params)                             # params, with a number for each array
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from ed_infra import parameter_names
from ed_infra.errors import ConfigError, did_you_mean

V = TypeVar("V")
D = TypeVar("D")


class Rules(Generic[V]):
    """An ordered list of rules. A rule without any match is an error.

    Args:
        rules: (pattern, value) pairs, in order.
        kind: Name of a rule in messages (`"sharding rule"`).

    Raises:
        ConfigError: A pattern is no regular expression, or `rules` are not pairs.
    """

    def __init__(self, rules: Iterable[tuple[str, V]], *, kind: str):
        self.kind = kind
        self._rules: list[tuple[str, re.Pattern[str], V]] = []
        for rule in rules:
            try:
                pattern, value = rule
                self._rules.append((pattern, re.compile(pattern), value))
            except re.error as error:
                raise ConfigError(f"{kind} {rule[0]!r} is not a pattern: {error}") from None
            except (TypeError, ValueError):
                raise ConfigError(
                    f"a {kind} is a pair of a regular expression and a value, got {rule!r}"
                ) from None
        self._used: set[int] = set()
        self._seen: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def map(self, function: Callable[[V], D]) -> Rules[D]:
        """Return the same patterns with `function(value)` instead of each value."""
        return Rules(((p, function(value)) for p, _, value in self._rules), kind=self.kind)

    def match(self, name: str) -> tuple[str, V] | None:
        """Return the pattern and value of the first rule that matches a canonical name.

        Every matching rule is marked as used, including rules after the first match.
        """
        self._seen[name] = None
        slashed = name.replace(".", "/")
        hits = [
            i
            for i, (_, regex, _) in enumerate(self._rules)
            if regex.search(slashed) or regex.search(name)
        ]
        self._used.update(hits)
        return (self._rules[hits[0]][0], self._rules[hits[0]][2]) if hits else None

    def at(self, path: Sequence[Any], default: D = None) -> V | D:
        """Return the value for the variable at a storage path; `default` if no rule matches.

        Raises:
            ConfigError: The values differ between layers that share one array.
        """
        names = parameter_names.canonical(path)
        matches = [self.match(name) for name in names]
        values = [default if match is None else match[1] for match in matches]
        for i, value in enumerate(values):
            if value != values[0]:
                first, other_pattern = (m[0] if m else "no rule" for m in (matches[0], matches[i]))
                raise ConfigError(
                    f"{self.kind}s give {names[0]} {values[0]} ({first!r}) and {names[i]} {value} "
                    f"({other_pattern!r}), but these layers are one stacked array: write one rule "
                    "for "
                    "both, or set scan_layers: false"
                )
        return values[0]

    def tree(self, state: object, default: object = None) -> Any:
        """Return `state` with each leaf replaced by the value of its rule.

        Args:
            state: A pytree with the paths of a model: `nnx.State`, or a dict of arrays.
            default: Value of a leaf without a rule.

        Returns:
            The structure of `state`, for example a mask or labels for optax.

        Raises:
            ConfigError: See `at`; or a rule matches nothing in `state`.
        """
        import jax

        result = jax.tree_util.tree_map_with_path(lambda path, _: self.at(path, default), state)
        self.check_used()
        return result

    def filter(self, default: object = None) -> Callable[[Sequence[Any], Any], bool]:
        """Return an nnx filter for the variables whose rule has a true value.

        Use it in `nnx.split(model, rules.filter(), ...)`, and call `check_used` afterwards.
        """
        return lambda path, _: bool(self.at(path, default))

    def check_used(self) -> None:
        """Raise ConfigError for a rule without any match; the message contains the nearest name."""
        for i, (pattern, _, _) in enumerate(self._rules):
            if i not in self._used:
                example = next(iter(self._seen), "(there are no parameters)")
                raise ConfigError(
                    f"{self.kind} {pattern!r} matches no parameter{self._nearest(pattern)}. "
                    f"Names look like {example}"
                )

    def _nearest(self, pattern: str) -> str:
        """Return a hint: the name part that is nearest to a pattern without its wildcards."""
        literal_text = re.sub(r"\\[dws]|[\\^$*+?()\[\]|]|\.(?=[*+])", "", pattern).replace("/", ".")
        words = [word for word in literal_text.split(".") if word]
        name_parts: dict[str, None] = {}
        for name in self._seen:
            parts = [part for part in name.split(".") if not part.isdigit() or part in words]
            for i in range(len(parts) - len(words) + 1):
                name_parts[".".join(parts[i : i + len(words)])] = None
        return did_you_mean(".".join(words), name_parts) if words else ""
