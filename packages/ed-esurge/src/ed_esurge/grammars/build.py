"""Conversion of a structured output to a matcher of llguidance.

The trial in a child process and the engine build the same grammar with the same limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ed_esurge.grammars.gbnf import convert_gbnf
from ed_esurge.grammars.limits import check_lark, check_regex, check_schema
from ed_esurge.grammars.rewriting import rewritten

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions, LLMatcher, LLTokenizer


GrammarSource = tuple[str, Any]
"""The kind of a grammar (`json_schema`, `regex`, `choice` or `grammar`), and its string(s).

The kind `schema_or_calls` has a schema and the beginnings of calls: strings and ids of tokens.
"""

# At most one space is allowed between JSON tokens. Otherwise a model may generate white space
# without end.
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}

# Without this option, llguidance tokenizes a text that must follow, and allows only these tokens.
# An added token stands there for its text (`<think>` in a key), but does not match the text.
ANY_TOKENS = '\n%llguidance {"no_forcing": true}'

# Limits of the compilation and of each matcher step. A matcher that exceeds a limit fails. The
# limits of grammar size and lexer states also limit memory: a state uses about 600 bytes.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


def make_tokenizer(serialized: str, size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return llguidance's form of a tokenizer.

    Args:
        serialized: the `tokenizers.Tokenizer`, as JSON.
        size: number of tokens.
        eos_token_ids: tokens that are allowed at the end of a grammar.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(serialized, n_vocab=size, eos_token=list(eos_token_ids) or None)


def grammar_text(source: GrammarSource) -> str:
    """Return a structured output in llguidance's format.

    Raises:
        GrammarError: the text is not a grammar, or is too deep or too large.
    """
    from llguidance import LLMatcher

    kind, content = source
    calls: Sequence[Sequence[str | int]] = ()
    if kind == "schema_or_calls":
        content, calls = content
    if kind in ("json_schema", "schema_or_calls"):
        check_schema(content)
        text = LLMatcher.grammar_from_json_schema(rewritten(content), defaults=JSON_STYLE)
        schema = {**json.loads(text)["grammars"][0], "name": "schema"}
        start = "start: @schema"
        if calls:
            start += f" | ({' | '.join(map(_beginning, calls))}) <[*]>*"
        return json.dumps({"grammars": [{"lark_grammar": f"{start}{ANY_TOKENS}"}, schema]})
    if kind == "regex":
        check_regex(content)
        pattern = json.loads(LLMatcher.grammar_from_regex(content))["grammars"][0]
        return pattern["lark_grammar"] + ANY_TOKENS
    if kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in content)
        return f"start: {texts}{ANY_TOKENS}"
    if "::=" in content:
        content = convert_gbnf(content)
    check_lark(content)
    # Text in braces is already llguidance's format.
    return content if content.lstrip().startswith("{") else content + ANY_TOKENS


def _beginning(parts: Sequence[str | int]) -> str:
    """Return strings and ids of tokens in the syntax of Lark.

    The beginning of a JSON object consists of the same lexemes as the objects of the schema.
    """
    pieces: list[str] = []
    for part in parts:
        if isinstance(part, int):
            pieces.append(f"<[{part}]>")
        elif part.startswith(("{", "[{")):
            lexemes = re.findall(r'[\[{]|"[^"]*"|:', part)
            pieces += ["/: ?/" if lexeme == ":" else json.dumps(lexeme) for lexeme in lexemes]
        else:
            pieces.append(json.dumps(part, ensure_ascii=False))
    return " ".join(pieces)


def build_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar. The matcher stores an error (`LLMatcher.get_error`)."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
