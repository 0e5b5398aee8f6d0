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
    return dumps(literal_value("".join(parts)))


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
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, lines) for item in items]
        case ast.Dict(keys=keys, values=values):
            known = {}
            for key, item in zip(keys, values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise ValueError("keys are texts")
                known[key.value] = _literal(item, lines)
            return known
    raise ValueError("no literal")
