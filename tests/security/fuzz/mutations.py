"""Mutations of JSON values, texts and bytes. Equal generators of random numbers repeat them."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any

#: Values that readers handle differently from ordinary ones.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, 2**53, 2**63, -(2**63), 2**64),
    *("", "a", "null", "NaN", "0", "\0", "\ud800", "\u202e", "🌍" * 10, "a" * 5000, "../../etc"),
    *("<s>", "</s>", "<|assistant|>", "<tool_call>", "{{ 7 * 7 }}", "%s%n", "http://127.0.0.1/"),
    *("data:;base64,", "data:image/png;base64,AAAA", "file:///etc/passwd", "stop", "auto"),
    *([], {}, [[]], [None], {"": None}, [0] * 500, ["a"] * 500, {"type": "object"}),
)
#: Numbers that JSON texts may contain, and Python's encoder does not write.
RAW_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "0" * 30 + "1")
_MARK = "\ue000number\ue000"
_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_EXTREMES_OF_8 = (*_EXTREMES, 2**63 - 1, 2**63, 2**64 - 1)
Path = tuple[Any, ...]
_MAX_DEPTH = 150


def list_paths(value: Any, above: Path = ()) -> list[Path]:
    """Return the paths of all values inside a JSON value, at most 2,000."""
    found, waiting = [], [(above, value)]
    while waiting and len(found) < 2000:
        path, here = waiting.pop()
        found.append(path)
        if isinstance(here, dict):
            waiting += [((*path, key), item) for key, item in here.items()]
        elif isinstance(here, list):
            waiting += [((*path, place), item) for place, item in enumerate(here[:50])]
    return found


def get_value(value: Any, path: Path) -> Any:
    """Return the value at a path."""
    for part in path:
        value = value[part]
    return value


def set_value(value: Any, path: Path, new: Any) -> Any:
    """Return a value with another value at a path. The parents change in place."""
    if not path:
        return new
    get_value(value, path[:-1])[path[-1]] = new
    return value


def nest(value: Any, depth: int, rng: random.Random) -> Any:
    """Return a value inside lists or mappings."""
    as_list = rng.random() < 0.5
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def mutate_text(text: str, rng: random.Random) -> str:
    """Return a text with one change."""
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return (
            text[:at]
            + rng.choice(["\0", "\ud800", "\n", '"', "\\", "é", "🌍", " " * 999])
            + text[at:]
        )
    if kind == 2:
        return text * rng.choice([2, 10, 200]) if len(text) < 5000 else text
    if kind == 3:
        return text[:at] + text[at + rng.randrange(1, 9) :]
    if kind == 4:
        return rng.choice([text.upper(), text.lower(), text[::-1], f" {text} "])
    return text[:at] + rng.choice([value for value in VALUES if isinstance(value, str)]) + text[at:]


def mutate_json(value: Any, rng: random.Random, others: Sequence[Any] = ()) -> Any:
    """Return a JSON value with one to four changes.

    Args:
        value: the value, which stays unchanged.
        others: values whose parts the changed value may contain.
    """
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        paths = list_paths(value)
        path = rng.choice(paths[1:] if paths[1:] and rng.random() < 0.95 else paths)
        here = get_value(value, path)
        kind = rng.randrange(9)
        if kind == 0:
            new = copy.deepcopy(rng.choice(VALUES))
        elif kind == 1 and isinstance(here, dict) and here:
            new = dict(here)
            key = rng.choice(list(new))
            item = new.pop(key)
            if rng.random() < 0.5:
                new[rng.choice(["", "type", "id", "name", mutate_text(str(key), rng)])] = item
        elif kind == 2 and isinstance(here, list) and here:
            new = [*here]
            place = rng.randrange(len(new))
            new = rng.choice([new[:place] + new[place + 1 :], new * rng.choice([2, 20]), new[::-1]])
        elif kind == 3 and isinstance(here, str):
            new = mutate_text(here, rng)
        elif kind == 4 and isinstance(here, int | float):
            new = rng.choice([-here, here + 1, here * 2**20, float(here), str(here), _MARK])
        elif kind == 5:
            new = nest(here, rng.choice([1, 2, 20, 60]), rng)
        elif kind == 6 and others:
            other = rng.choice(others)
            new = copy.deepcopy(get_value(other, rng.choice(list_paths(other))))
        elif kind == 7:
            new = copy.deepcopy(get_value(value, rng.choice(list_paths(value))))
        else:
            new = rng.choice([[here], {"type": here}, None, str(here)[:2000]])
        value = set_value(value, path, new)
        # Python's functions on values are recursive; `write_json` nests texts more deeply.
        if max(map(len, list_paths(value))) > _MAX_DEPTH:
            return copy.deepcopy(rng.choice(VALUES))
    return value


def write_json(value: Any, rng: random.Random) -> bytes:
    """Return the JSON text of a value, sometimes with extreme numbers or damaged bytes."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    text = text.replace(json.dumps(_MARK), rng.choice(RAW_NUMBERS))
    text = text.replace(json.dumps(_MARK, ensure_ascii=False), rng.choice(RAW_NUMBERS))
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.01:
        depth = rng.choice([500, 2000, 100_000])
        data = b"[" * depth + data + b"]" * depth
    return mutate_bytes(data, rng) if rng.random() < 0.1 else data


def mutate_bytes(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return bytes with one to eight changes, most of them near the start."""
    content = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        size = len(content)
        near = rng.random() < 0.6
        at = rng.randrange(min(size, 256) + 1) if near else rng.randrange(size + 1)
        kind = rng.randrange(8)
        if kind == 0 and at < size:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < size:
            content[at] = rng.choice(_EXTREMES) & 0xFF
        elif kind == 2:
            width, form = rng.choice([(2, "H"), (4, "I"), (8, "Q")])
            number = rng.choice(_EXTREMES_OF_8) % 2 ** (8 * width)
            content[at : at + width] = struct.pack(rng.choice("<>") + form, number)
        elif kind == 3:
            del content[at : at + rng.choice([1, 2, 4, 16, 256])]
        elif kind == 4:
            start = rng.randrange(size + 1)
            content[at:at] = content[start : start + rng.choice([1, 4, 16, 256])]
        elif kind == 5:
            content[at:at] = rng.randbytes(rng.choice([1, 4, 64]))
        elif kind == 6 and others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            content[at:] = other[start:]
        elif kind == 7 and rng.random() < 0.3:
            del content[at:]
    return bytes(content)
