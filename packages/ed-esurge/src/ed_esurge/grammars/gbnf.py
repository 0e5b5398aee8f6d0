"""GBNF, the grammars of llama.cpp: spellings that llguidance's converter does not read are replaced
by equal ones."""

from __future__ import annotations

import re
from itertools import pairwise

from ed_esurge.grammars.limits import GrammarError

_PART = re.compile(
    r"""
    (?P<skip> \s+ | \#[^\n\r]* )
    | (?P<literal> "(?:\\.|[^"\\])*" )
    | (?P<letters> \[(?:\\.|[^\]\\])*\] )
    | (?P<repeat> [*+?] | \{[^}]*\} )
    | (?P<name> [\w-]+ )
    | (?P<other> ::= | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE = re.compile(r"[a-z][a-z0-9_]*")


def convert_gbnf(text: str) -> str:
    """Return a GBNF grammar in Lark syntax.

    Raises:
        GrammarError: the text is not a grammar.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_respell(text))
    except GrammarError:
        raise
    except Exception as error:  # the converter raises plain exceptions
        raise GrammarError(f"the GBNF grammar is invalid: {error}") from None


def _respell(text: str) -> str:
    parts = [(str(match.lastgroup), match[0]) for match in _PART.finditer(text)]
    signs = [(place, part) for place, part in enumerate(parts) if part[0] != "skip"]
    names = _rename([one for (_, (kind, one)), (_, sign) in pairwise(signs) if sign[1] == "::="])
    result = [
        _decode(one, kind) if kind in ("literal", "letters") else names.get(one, one)
        for kind, one in parts
    ]
    # The converter writes the group of "([a-z]+)+" without its parentheses. An empty text in the
    # group keeps them.
    for (_, previous_part), (place, (_, bracket)), (_, next_part) in zip(
        signs, signs[1:], signs[2:], strict=False
    ):
        if (
            bracket == ")"
            and next_part[0] == "repeat"
            and (previous_part[0] == "repeat" or previous_part[1] == ")")
        ):
            result[place] = ' "")'
    return "".join(result)


def _rename(rules: list[str]) -> dict[str, str]:
    """Return other names for the rules whose names Lark does not allow, or would confuse."""
    used_names = {*rules}
    names: dict[str, str] = {}
    for number, rule in enumerate(rules):
        if rule == "start" or not _SIMPLE.fullmatch(rule):
            name = f"rule_{number}"
            while name in used_names:
                name += "_"
            names[rule] = name
            used_names.add(name)
    return names


def _decode(text: str, kind: str) -> str:
    """Replace the escapes of GBNF that Lark does not have."""

    def replace(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        if digits is None:
            is_bracket = kind == "literal" and match[3] in "[]"
            return match[3] if is_bracket else match[0]
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise GrammarError(f"the GBNF grammar is invalid: {match[0]} is not a character")
        return f"\\x{code:02x}" if code < 0x80 else chr(code)

    return _ESCAPE.sub(replace, text)
