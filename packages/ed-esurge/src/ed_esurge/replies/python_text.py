"""Conversion of Python literals in calls to JSON."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from ed_esurge.replies.json_text import MAX_DEPTH, dumps, replace_surrogates
from ed_esurge.replies.scanner import Malformed, Reader, Scanner

_PLAIN = re.compile(r"""[^"'()\[\]{},\\]*""")
_INSIDE = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
#: What follows the last character of an argument, within a number of characters.
_AFTER_ARGUMENT = re.compile(r"\s*(\)\s*([\],<\n]|$)|,\s*[A-Za-z_]\w*\s*=|$)")
_WINDOW = 64
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=[1-9]\d*(?![\w.]))")
_NAMES = {"true": True, "false": False, "null": None, "none": None}


def argument(src: Scanner) -> Reader[str]:
    """Read a literal up to a `,` or `)`, which is not consumed, and return its JSON text.

    Raises:
        Malformed: the text is not a literal.
    """
    parts: list[str] = []
    open_: list[str] = []
    start = 0  # of the parts after the last text
    while True:
        parts.append(src.run(_PLAIN))
        character = yield from src.peek()
        if not open_ and character in ",)":
            break
        if character in "([{":
            open_.append({"(": ")", "[": "]", "{": "}"}[character])
            if len(open_) > MAX_DEPTH:
                raise Malformed
        elif character in ")]}" and (not open_ or open_.pop() != character):
            raise Malformed
        src.at += 1
        parts.append(character)
        if character in "\"'":
            parts[start:] = [_LEADING_ZEROS.sub("", "".join(parts[start:]))]
            yield from _read_quoted_text(src, parts, character)
            start = len(parts)
    parts[start:] = [_LEADING_ZEROS.sub("", "".join(parts[start:]))]
    return dumps(literal_value("".join(parts)))


def _read_quoted_text(src: Scanner, parts: list[str], quote: str) -> Reader[None]:
    has_quotes = False  # without escapes
    while True:
        # A line break within quotes is invalid Python, but means a line break.
        parts.append(_escape_controls(src.run(_INSIDE[quote])))
        character = yield from src.peek()
        src.at += 1
        if character == quote and not (yield from _ends_text(src, strict=has_quotes)):
            has_quotes = True
            parts.append(f"\\{quote}")
            continue
        parts.append(_escape_controls(character))
        if character == quote:
            return
        if character == "\\":
            parts.append((yield from src.peek()))
            src.at += 1


def _escape_controls(text: str) -> str:
    """Escape the line breaks and null characters that Python does not allow within quotes."""
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\x00")


def _ends_text(src: Scanner, *, strict: bool) -> Reader[bool]:
    """Return whether a quote ends a text: what follows can follow a literal.

    A model may write quotes within a text without escapes. After the first of them, only the end
    of the call or the name of the next argument ends the text (`strict`).
    """
    if strict:
        while len(src.text) < src.at + _WINDOW and not src.ended:
            yield from src.more()
        return _AFTER_ARGUMENT.match(src.text[src.at : src.at + _WINDOW]) is not None
    place = src.position
    yield from src.space()
    follows = src.text[src.at : src.at + 1]
    src.at = place - src.discarded
    return follows in ",)]}:\"'"


def literal_value(text: str) -> Any:
    """Return the value of a Python literal that JSON can express.

    Raises:
        Malformed: the text is no such literal.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return replace_surrogates(_literal(tree.body, text.strip().encode().split(b"\n")))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error


def _literal(node: ast.expr, lines: list[bytes]) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            if isinstance(value, float) and math.isinf(value):  # the text, as in JSON
                return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            return value
        case ast.Name(id=name) if name.lower() in _NAMES:
            return _NAMES[name.lower()]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as operand):
            value = _literal(operand, lines)
            return f"-{value}" if isinstance(value, str) else -value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_literal(item, lines) for item in items]
        case ast.Dict(keys=keys, values=values):
            members = {}
            for key, item in zip(keys, values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise ValueError("keys are texts")
                members[key.value] = _literal(item, lines)
            return members
    raise ValueError("no literal")
