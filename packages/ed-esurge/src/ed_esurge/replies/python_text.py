"""Conversion of Python literals in calls to JSON."""

from __future__ import annotations

import ast
import re
from typing import Any

from ed_esurge.replies.json_text import MAX_DEPTH, dumps
from ed_esurge.replies.scanner import Malformed, Reader, Scanner

_PLAIN = re.compile(r"""[^"'()\[\]{},\\]*""")
_INSIDE = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_NAMES = {"true": True, "false": False, "null": None, "none": None}


def argument(src: Scanner) -> Reader[str]:
    """Read a literal up to a `,` or `)`, which is not consumed, and return its JSON text.

    Raises:
        Malformed: the text is not a literal.
    """
    parts: list[str] = []
    open_: list[str] = []
    while True:
        parts.append(src.run(_PLAIN))
        here = yield from src.peek()
        if not open_ and here in ",)":
            break
        if here in "([{":
            open_.append({"(": ")", "[": "]", "{": "}"}[here])
            if len(open_) > MAX_DEPTH:
                raise Malformed
        elif here in ")]}" and (not open_ or open_.pop() != here):
            raise Malformed
        src.at += 1
        parts.append(here)
        if here in "\"'":
            yield from _quoted(src, parts, here)
    return dumps(_value("".join(parts)))


def _quoted(src: Scanner, parts: list[str], quote: str) -> Reader[None]:
    while True:
        # A line break within quotes is invalid Python, but means a line break.
        parts.append(src.run(_INSIDE[quote]).replace("\n", "\\n"))
        here = yield from src.peek()
        src.at += 1
        parts.append("\\n" if here == "\n" else here)
        if here == quote:
            return
        if here == "\\":
            parts.append((yield from src.peek()))
            src.at += 1


def _value(text: str) -> Any:
    try:
        tree = ast.parse(text.strip(), mode="eval")
        result = _literal(tree.body)
        dumps(result).encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error
    return result


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            if isinstance(value, float) and (value != value or value in (1e999, -1e999)):
                raise ValueError("no JSON number")
            return value
        case ast.Name(id=name) if name.lower() in _NAMES:
            return _NAMES[name.lower()]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            known = {}
            for key, item in zip(keys, values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise ValueError("keys are texts")
                known[key.value] = _literal(item)
            return known
    raise ValueError("no literal")
