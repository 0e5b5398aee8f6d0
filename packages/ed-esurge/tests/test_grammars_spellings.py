"""Grammars may force every text in every spelling: texts of added tokens, and GBNF of llama.cpp."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from ed_esurge.grammars.build import build_matcher, grammar_text, make_tokenizer
from ed_esurge.grammars.trial import compile_grammar, try_matcher
from ed_esurge.testing import byte_tokenizer

TAGS = ["<think>", "</think>", "<tool_call>", "[INST]", "◁x▷"]


@pytest.fixture(scope="module", params=["special", "added"])
def tagged(request):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(TAGS, special_tokens=request.param == "special")
    serialized = tokenizer.backend_tokenizer.to_str()
    return make_tokenizer(serialized, len(tokenizer), [tokenizer.eos_token_id])


def write_text(tokenizer, source, seed=0):
    """Return a random text of a grammar."""
    draw = random.Random(seed)
    matcher = build_matcher(tokenizer, grammar_text(source))
    written = b""
    for _ in range(200):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        token = tokenizer.eos_token if tokenizer.eos_token in allowed else draw.choice(allowed)
        assert matcher.consume_token(token), matcher.get_error()
        if token != tokenizer.eos_token:
            written += tokenizer.decode_bytes([token])
        if matcher.is_stopped():
            return written.decode()
    raise AssertionError(f"no end: {written!r}")


def make_schema(tag, place):
    schemas = {
        "key": {"properties": {tag: {"type": "null"}}, "required": [tag]},
        "value": {"properties": {"a": {"const": f"x{tag}y"}}, "required": ["a"]},
        "listed": {"properties": {"a": {"enum": [tag]}}, "required": ["a"]},
        "pattern": {
            "properties": {"a": {"type": "string", "pattern": f"^a{re.escape(tag)}$"}},
            "required": ["a"],
        },
    }
    return json.dumps({"type": "object", "additionalProperties": False, **schemas[place]})


@pytest.mark.parametrize("tag", TAGS)
def test_grammars_force_texts_of_added_tokens(tagged, tag):
    literal = json.dumps(tag, ensure_ascii=False)
    sources = [
        ("choice", (tag,)),
        ("choice", (f"{tag}none", f"b{tag}")),
        ("regex", f"(a|b){re.escape(tag)}c"),
        ("grammar", f'start: "x" {literal} "y"'),
        ("grammar", f'root ::= "x"? {literal} "y"'),
        *(("json_schema", make_schema(tag, place)) for place in ("key", "value", "listed")),
        ("json_schema", make_schema(tag, "pattern")),
    ]
    for source in sources:
        _, matcher = compile_grammar(tagged, source)
        try_matcher(matcher)
        for seed in range(2):
            assert tag in write_text(tagged, source, seed), source


def test_grammars_can_name_an_added_token_itself(tagged):
    matcher = build_matcher(tagged, grammar_text(("grammar", 'start: "a" <think> "b"')))
    for token in tagged.tokenize_str("a") + tagged.tokenize_str("<think>", parse_special=True):
        assert matcher.consume_token(token), matcher.get_error()


GBNF = {
    "repeated group": ('root ::= ([a-c]+)+ "."', r"[a-c]+\."),
    "repeated count": ('root ::= ([a-c]{2})* "."', r"([a-c]{2})*\."),
    "repeated option": ('root ::= (("a"?))+ "."', r"a*\."),
    "inner rule": ('root ::= x+ "."\nx ::= (("a" | "b"+)+ ", "?)+', r"(a|b|, )+\."),
    "short escape": (r'root ::= "\u0041" [\u0042-\u0043]', "A[BC]"),
    "long escape": (r'root ::= "\U0001F600" [\U0001F601]', "\U0001f600\U0001f601"),
    "escaped sign": (r'root ::= "\u0022\u005c" [\u005d]', r'"\\]'),
    "escaped bracket": (r'root ::= "\[a\]" [\[\]]', r"\[a\][\[\]]"),
    "names": ('root ::= 1a aB a-b\n1a ::= "1"\naB ::= "x"\na-b ::= "y"', "1xy"),
    "rule start": ('root ::= start\nstart ::= "s" rule_1\nrule_1 ::= "t"', "st"),
    "comment": ('root ::= "a" # ) + ( "\n', "a"),
}


@pytest.mark.parametrize("name", GBNF)
def test_every_spelling_of_gbnf_is_read(tagged, name):
    grammar, pattern = GBNF[name]
    for seed in range(4):
        text = write_text(tagged, ("grammar", grammar), seed)
        assert re.fullmatch(pattern, text), text
