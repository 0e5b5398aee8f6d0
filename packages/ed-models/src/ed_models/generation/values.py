"""Validation of option values, and their conversion to the arrays of a program.

Legend: m sequences, n tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeGuard

import jax
import numpy as np
from ed_infra.errors import ConfigError
from jaxtyping import Array, Float, Int

#: Most sequences of an option, and most tokens of one.
MOST_SEQUENCES, LONGEST_SEQUENCE = 65_536, 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bans:
    """Sequences of tokens that must not be completed; numpy, until a program has them.

    Attributes:
        prefixes: [m, n - 1], all but the last token, right-aligned; -1 before the first token.
        last: [m], the last tokens.
    """

    prefixes: Int[Array, "m n-1"]
    last: Int[Array, " m"]

    @classmethod
    def read(cls, name: str, value: object) -> Bans | None:
        """Read `[[token, ...], ...]`; None if it is empty.

        Raises:
            ConfigError: it is something else, or too much.
        """
        sequences = list(value) if isinstance(value, list | tuple) else [value]
        return cls(*align_sequences(name, sequences)) if sequences else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Biases:
    """Token sequences, and the bias of each last token; `prefixes` and `last` as in `Bans`."""

    prefixes: Int[Array, "m n-1"]
    last: Int[Array, " m"]
    bias: Float[Array, " m"]

    @classmethod
    def read(cls, name: str, value: object) -> Biases | None:
        """Read `{(token, ...): bias}` or `[[[token, ...], bias], ...]`; None if it is empty.

        Raises:
            ConfigError: it is something else, or too much.
        """
        pairs = value.items() if isinstance(value, Mapping) else value
        try:
            sequences, biases = [], []
            if not isinstance(pairs, Iterable):
                raise TypeError
            for sequence, bias in pairs:
                sequences.append(sequence)
                biases.append(bias)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{name} is {value!r}; it must be {{(token, ...): bias}} or "
                "[[[token, ...], bias], ...]"
            ) from None
        for bias in biases:
            if not _is_number(bias) or math.isnan(bias) or bias == math.inf:
                raise ConfigError(
                    f"{name} has a bias of {bias!r}; it must be a number, -inf for a ban"
                )
        if not sequences:
            return None
        bias: Any = np.asarray(biases, np.float32)
        return cls(*align_sequences(name, sequences), bias)


def align_sequences(name: str, sequences: Sequence[object]) -> tuple[Any, Any]:
    """Prefixes [m, n - 1] and last tokens [m] of sequences, as in `Bans`."""
    token_lists: list[list[int]] = []
    for sequence in sequences:
        if not (isinstance(sequence, list | tuple) and sequence and all(map(is_token, sequence))):
            raise ConfigError(
                f"{name} has {sequence!r}; each sequence must be a list of at least one token id"
            )
        token_lists.append(list(sequence))
    longest = max(map(len, token_lists))
    if len(token_lists) > MOST_SEQUENCES or longest > LONGEST_SEQUENCE:
        raise ConfigError(
            f"{name} has {len(token_lists)} sequences of up to {longest} tokens; at most "
            f"{MOST_SEQUENCES} of {LONGEST_SEQUENCE} are possible"
        )
    padded = np.asarray([[-1] * (longest - len(x)) + x for x in token_lists], np.int32)
    return padded[:, :-1], padded[:, -1]


def check_number(fits: Callable[[float], bool], constraint: str) -> Callable[[str, object], float]:
    """A reader of finite numbers in a range."""

    def read(name: str, value: object) -> float:
        if not (_is_number(value) and math.isfinite(value) and fits(value)):
            raise ConfigError(f"{name} is {value!r}; it must be {constraint}")
        return float(value)

    return read


def build_integer_reader(
    least: int, most: int = 2**31 - 1, *, constraint: str = ""
) -> Callable[[str, object], int]:
    """A reader of whole numbers in a range; `constraint` words the range."""
    upper = f", at most {most}" if most < 2**31 - 1 else ""
    constraint = constraint or f"a whole number of at least {least}{upper}"

    def read(name: str, value: object) -> int:
        if not (is_whole(value) and least <= value <= most):
            raise ConfigError(f"{name} is {value!r}; it must be {constraint}")
        return int(value)

    return read


def flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False")
    return value


def token_list(most: int = MOST_SEQUENCES) -> Callable[[str, object], np.ndarray | None]:
    """A reader of a token id, or of up to `most` in a list; None where the list is empty."""

    def read(name: str, value: object) -> np.ndarray | None:
        ids = validate_token_ids(name, value)
        if len(ids) > most or any(token < 0 for token in ids):
            many = "a token id" if most == 1 else f"token ids of at least 0, at most {most}"
            raise ConfigError(f"{name} is {value!r}; it must be {many}")
        return np.asarray(ids, np.int32) if ids else None

    return read


def validate_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Read a special token of a configuration: a token id, several, or None.

    Raises:
        ConfigError: it is something else.
    """
    candidates = value if isinstance(value, list | tuple) else [] if value is None else [value]
    ids = tuple(int(token) for token in candidates if is_whole(token))
    if len(ids) < len(candidates):
        raise ConfigError(f"{name} is {value!r}; it must be a token id, or several in a list")
    return ids


def decay(name: str, value: object) -> tuple[int, float]:
    """`(start, factor)`: behind `start` new tokens, the n-th adds `factor**n - 1` times its
    magnitude to the score of an end token.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, list | tuple) and len(value) == 2:
        start, factor = value
        if is_whole(start) and start >= 0 and _is_number(factor) and 0 < factor < math.inf:
            return int(start), float(factor)
    raise ConfigError(
        f"{name} is {value!r}; it must be (start, factor): new tokens before it begins, and a "
        "number above 0"
    )


def callables(name: str, value: object) -> tuple[Callable[..., jax.Array], ...]:
    """One function `(input_ids, scores) -> scores`, or a list of them.

    Raises:
        ConfigError: it is something else, or cannot be a key of compiled programs.
    """
    functions: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"{name} has {function!r}; it must be functions (input_ids, scores) -> scores"
            )
        try:
            hash(function)
        except TypeError:
            raise ConfigError(
                f"{name} has {function!r}, which is not hashable; programs are compiled for each "
                "function: pass a function, or define in its class __hash__ and __eq__"
            ) from None
    return functions


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_token(value: object) -> TypeGuard[int]:
    """Whether it can be a token id."""
    return is_whole(value) and value >= 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
