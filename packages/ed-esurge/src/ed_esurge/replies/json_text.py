"""Incremental validation of JSON. The emitted text is always a prefix of a valid JSON text."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ed_esurge.replies.scanner import Ended, Malformed, Reader, Scanner, Write

MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HEX = frozenset("0123456789abcdefABCDEF")
_HIGH, _LOW = re.compile("[dD][89abAB]"), re.compile("[dD][c-fC-F]")
_MAX_SCALAR = 512
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def dumps(value: object) -> str:
    """Return a value as JSON text in the parser's format."""
    return json.dumps(value, ensure_ascii=False)


def loads(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        Malformed: the text is not valid JSON.
    """

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def read_float(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            raise ValueError(digits)
        return number

    try:
        result = json.loads(text, parse_constant=refuse, parse_float=read_float)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    return replace_surrogates(result) if "\\u" in text else result


def loads_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} if the text is not valid, as after a stop string.

    A number that readers would read as infinity stays text.
    """

    def read_float(digits: str) -> float | str:
        number = float(digits)
        return digits if math.isinf(number) else number

    try:
        arguments = json.loads(text or "{}", parse_float=read_float, parse_constant=str)
    except (ValueError, RecursionError):
        return {}
    return replace_surrogates(arguments) if isinstance(arguments, dict) else {}


def replace_surrogates(value: object) -> Any:
    """Return a JSON value in which the replacement character replaces halves of UTF-16 pairs.

    JSON can escape such a half, and UTF-8 cannot encode it.
    """
    if isinstance(value, str):
        return value if _SURROGATE.search(value) is None else _whole_characters(value)
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return value


def _whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def value(src: Scanner, write: Write, depth: int = 0) -> Reader[None]:
    """Read a value and emit its text. Control characters within strings are escaped.

    Raises:
        Malformed: the text is not valid JSON, or is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise Malformed
    yield from _space(src, write)
    first = yield from src.peek()
    if first == '"':
        yield from string(src, write)
    elif first == "{":
        yield from _items(src, write, "}", depth)
    elif first == "[":
        yield from _items(src, write, "]", depth)
    else:
        yield from _scalar(src, write)


def string_value(src: Scanner) -> Reader[str]:
    """Read a string and return its value."""
    parts: list[str] = []
    yield from src.space()
    yield from string(src, parts.append)
    return loads("".join(parts))


def string(src: Scanner, write: Write) -> Reader[None]:
    """Read a string with its quotes."""
    if (yield from src.peek()) != '"':
        raise Malformed
    src.at += 1
    write('"')
    while True:
        piece = src.run(_PLAIN)
        if piece:
            write(piece)
        character = yield from src.peek()
        src.at += 1
        if character == '"':
            write('"')
            return
        if character == "\\":
            yield from _escape(src, write)
        elif ord(character) < 0x20:
            write(json.dumps(character)[1:-1])
        else:  # a plain character that arrived after the last match
            write(character)


def _escape(src: Scanner, write: Write) -> Reader[None]:
    kind = yield from src.peek()
    if kind not in '"\\/bfnrtu':
        raise Malformed
    src.at += 1
    if kind != "u":
        write("\\" + kind)
        return
    unit = yield from _unit(src)
    while unit is not None:
        text, following = f"\\u{unit}", None
        if _HIGH.match(unit):
            text = "\\ufffd"
            if (yield from src.literal("\\u")) is not None:
                following = yield from _unit(src)
                if _LOW.match(following):
                    text, following = f"\\u{unit}\\u{following}", None
        elif _LOW.match(unit):
            text = "\\ufffd"
        write(text)
        unit = following


def _unit(src: Scanner) -> Reader[str]:
    """Read four hexadecimal digits."""
    digits = ""
    while len(digits) < 4:
        digit = yield from src.peek()
        if digit not in _HEX:
            raise Malformed
        src.at += 1
        digits += digit
    return digits


def _items(src: Scanner, write: Write, close: str, depth: int) -> Reader[None]:
    """Read the rest of an object or a list."""
    write(src.text[src.at])
    src.at += 1
    yield from _space(src, write)
    more = (yield from src.peek()) != close
    while more:
        if close == "}":
            yield from _space(src, write)
            yield from string(src, write)
            yield from _space(src, write)
            if (yield from src.peek()) != ":":
                raise Malformed
            src.at += 1
            write(":")
        yield from value(src, write, depth + 1)
        yield from _space(src, write)
        character = yield from src.peek()
        if character not in (",", close):
            raise Malformed
        more = character == ","
        if more:
            src.at += 1
            write(",")
    src.at += 1
    write(close)


def _scalar(src: Scanner, write: Write) -> Reader[None]:
    text, ended = "", False
    while not ended and (piece := src.run(_SCALAR)):
        text += piece
        try:
            yield from src.peek()
        except Ended:
            ended = True
    try:
        if len(text) > _MAX_SCALAR:
            raise Malformed
        if _NUMBER.fullmatch(text) and math.isinf(float(text)):
            text = dumps(text)  # readers would read infinity, which is not JSON
        else:
            loads(text)
    except Malformed:
        src.at -= len(text)  # wherever the pieces ended
        raise
    write(text)


def _space(src: Scanner, write: Write) -> Reader[None]:
    yield from src.peek()
    while piece := src.run(_SPACE):
        write(piece)
        yield from src.peek()
