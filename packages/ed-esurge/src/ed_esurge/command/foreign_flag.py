"""A flag of vLLM or llama.cpp, and what it means here: the record of the tables of flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

VLLM, LLAMA_CPP = "vLLM", "llama.cpp"
#: Flag that collects the values of several flags of llama.cpp.
OVERRIDE = "--override-generation-config"
ALWAYS_ON = "is always on here"
SET_IN_CONFIG = "set the field of the model's configuration with --config-kwargs"
_SIZES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another server.

    Attributes:
        program: the other server.
        names: its spellings, the most common first.
        target: the flag of this program; empty if there is none. `MODEL` is the argument.
        is_switch: whether the flag has no value; `value` is then that of `target`.
        value: the value of a switch.
        values: value of the flag -> value here; an empty text omits the flag.
        convert: value of the flag -> value here, or several, for values that are not in `values`.
            Raises ValueError.
        unless: flags that already say what this flag says.
        note: why the flag has no effect, if it has no target.
        refusal: what to write instead, for values that are neither in `values` nor have a target.
    """

    program: str
    names: tuple[str, ...]
    target: str = ""
    is_switch: bool = False
    value: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[str], str | list[str]] | None = None
    unless: tuple[str, ...] = ()
    note: str = ""
    refusal: str = ""


def read_size(text: str) -> str:
    """Return a number of tokens such as 32k (1,000s) or 32K (1,024s) as digits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    if match is None:
        return text
    return str(int(float(match[1]) * _SIZES[match[2]]))


def read_list(text: str) -> list[str]:
    """Return the texts of a JSON list; raise ValueError for another value."""
    values = json.loads(text)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("a JSON list of texts")
    return values


def ignore_switch(program: str, names: str, note: str) -> ForeignFlag:
    """Return flags without a value that have no effect, for the reason of `note`."""
    return ForeignFlag(program, tuple(names.split()), is_switch=True, note=note)


def ignore_value(program: str, names: str, note: str) -> ForeignFlag:
    """Return flags with a value that have no effect, for the reason of `note`."""
    return ForeignFlag(program, tuple(names.split()), note=note)


def refuse_value(program: str, names: str, refusal: str, *idle: str, note: str = "") -> ForeignFlag:
    """Return flags that are refused, except with the values `idle`, which have no effect."""
    values = dict.fromkeys(idle, "")
    note = note or ("is the behavior of this server" if idle else "")
    return ForeignFlag(program, tuple(names.split()), values=values, note=note, refusal=refusal)


def refuse_switch(program: str, names: str, refusal: str) -> ForeignFlag:
    """Return flags without a value that are refused."""
    return ForeignFlag(program, tuple(names.split()), is_switch=True, refusal=refusal)
