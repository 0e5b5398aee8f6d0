"""Texts of grammars for `uniqueItems` and overlapping `oneOf` satisfy the original schema."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ed_esurge.grammars.build import build, grammar_text, make_tokenizer
from ed_esurge.grammars.rewriting import rewritten
from ed_esurge.testing import byte_tokenizer

jsonschema = pytest.importorskip("jsonschema")

COLORS = {"enum": ["red", "green", "blue"]}
CIRCLE = {"type": "object", "properties": {"r": {"type": "integer"}}, "required": ["r"]}
SQUARE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
NAMED = {
    "type": "object",
    "properties": {"r": {"type": "integer"}, "name": {"const": "x"}},
    "required": ["r", "name"],
    "additionalProperties": False,
}
SCHEMAS = {
    "unique": {"type": "array", "items": COLORS, "uniqueItems": True},
    "bounded": {"type": "array", "items": COLORS, "uniqueItems": True, "minItems": 2},
    "booleans": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    "single": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    "equal values": {"type": "array", "items": {"enum": [1, 1.0, True]}, "uniqueItems": True},
    "inside": {
        "type": "object",
        "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/c"}, "uniqueItems": True}},
        "required": ["c"],
        "additionalProperties": False,
        "$defs": {"c": COLORS},
    },
    "objects": {"oneOf": [CIRCLE, SQUARE]},
    "references": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": CIRCLE, "b": SQUARE},
    },
    "subset": {"oneOf": [CIRCLE, NAMED]},
    "three": {"oneOf": [CIRCLE, NAMED, SQUARE, {"type": "null"}]},
    "listed": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c", 1]}]},
    "types": {"oneOf": [{"type": "boolean"}, {"type": "integer"}, CIRCLE]},
}


def texts(schema, count):
    """Return random texts of the grammar of a schema."""
    tokenizer = byte_tokenizer()
    serialized = tokenizer.backend_tokenizer.to_str()
    known = make_tokenizer(serialized, len(tokenizer), [tokenizer.eos_token_id])
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    draw = np.random.default_rng(0)
    grammar = grammar_text(("json_schema", json.dumps(schema)))
    for _ in range(count):
        matcher = build(known, grammar)
        assert not matcher.get_error(), matcher.get_error()
        tokens = []
        while not matcher.is_stopped() and len(tokens) < 60:
            mask = allocate_token_bitmask(1, known.vocab_size)
            fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            # The end is preferred, so that numbers and objects stay short.
            ends = tokenizer.eos_token_id in allowed and draw.random() < 0.5
            token = tokenizer.eos_token_id if ends else int(draw.choice(allowed))
            matcher.consume_token(token)
            tokens.append(token)
        if matcher.is_stopped():
            yield tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.daily("unique", "three")
@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_of_rewritten_schemas_satisfy_the_original_schema(name):
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    found = [json.loads(text) for text in texts(schema, 40)]
    assert len(found) > 5
    for value in found:
        validator.validate(value)
    if name in ("unique", "objects", "three"):
        assert len({json.dumps(value) for value in found}) > 3


def test_schemas_without_an_equivalent_stay_unchanged():
    for schema in (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True},
        {"oneOf": [{}, {}]},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"oneOf": [CIRCLE, CIRCLE]},
    ):
        assert json.loads(rewritten(json.dumps(schema))) == schema


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bounds", [{}, {"minItems": 15_000}, {"minItems": 2, "maxItems": 30_000}])
def test_unique_arrays_of_too_many_values_stay_as_they_are(bounds):
    schema = {"type": "array", "items": {"enum": [*range(30_000)]}, "uniqueItems": True, **bounds}
    assert json.loads(rewritten(json.dumps(schema))) == schema
