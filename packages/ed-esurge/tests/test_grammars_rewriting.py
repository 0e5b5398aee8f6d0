"""Texts of grammars for schemas that are rewritten satisfy the original schema."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ed_esurge.grammars.build import build_matcher, grammar_text, make_tokenizer
from ed_esurge.grammars.limits import GrammarError
from ed_esurge.grammars.rewriting import rewritten
from ed_esurge.testing import byte_tokenizer

jsonschema = pytest.importorskip("jsonschema")

COLORS = {"enum": ["red", "green", "blue"]}
CIRCLE = {"type": "object", "properties": {"r": {"type": "integer"}}, "required": ["r"]}
SQUARE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
BOOLEAN = {"type": "boolean"}


def make_object(properties, **keywords):
    """Return a schema of objects."""
    return {"type": "object", "properties": properties, **keywords}


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
    "names of text": make_object({}, propertyNames={"type": "string"}, maxProperties=2),
    "names of a list": make_object({"a": BOOLEAN}, propertyNames={"enum": ["a", "b"]}),
    "names of a pattern": make_object({}, propertyNames={"pattern": "^[ab]$"}, maxProperties=2),
    "names of a length": make_object({}, propertyNames={"maxLength": 1}, maxProperties=2),
    "unevaluated": make_object({"a": BOOLEAN}, unevaluatedProperties=False, required=["a"]),
    "unevaluated true": {"type": "array", "items": BOOLEAN, "unevaluatedItems": True},
    "whole floats": {"type": "array", "items": BOOLEAN, "minItems": 1.0, "maxItems": 2.0},
    "contains anything": {"type": "array", "items": BOOLEAN, "contains": {}, "maxItems": 2},
    "if alone": {"if": {"type": "string"}, "type": "boolean"},
    "then alone": {"then": {"type": "string"}, "else": False, "type": "boolean"},
    "condition": make_object(
        {"k": {"enum": ["x", "y"]}, "v": {"type": ["boolean", "null"]}},
        required=["k", "v"],
        additionalProperties=False,
        **{"if": {"properties": {"k": {"const": "x"}}, "required": ["k"]}},
        **{"then": {"properties": {"v": BOOLEAN}}, "else": {"properties": {"v": {"const": None}}}},
    ),
    "not required": make_object({"b": BOOLEAN, "c": BOOLEAN}, **{"not": {"required": ["b"]}}),
    "not both": make_object(
        {"b": BOOLEAN, "c": BOOLEAN},
        additionalProperties=False,
        minProperties=1,
        **{"not": {"required": ["b", "c"]}},
    ),
    "not one of": make_object(
        {"b": BOOLEAN, "c": BOOLEAN},
        additionalProperties=False,
        **{"not": {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}},
    ),
    "not a type": {"not": {"type": ["object", "array", "string", "number"]}},
    "not listed": {"enum": ["a", "b", 1], "not": {"enum": ["a"]}},
    "not empty": {"type": "string", "maxLength": 2, "not": {"const": ""}},
    "not a text": {"type": "string", "pattern": "^[ab]{1,2}$", "not": {"enum": ["a", "ab"]}},
    "not a value": make_object(
        {"k": {"enum": ["x", "y", "z"]}},
        required=["k"],
        **{"not": {"properties": {"k": {"const": "x"}}}},
    ),
    "not long": {"type": "string", "not": {"minLength": 3}},
    "dependencies": make_object(
        {"a": BOOLEAN, "b": BOOLEAN, "c": {"type": "null"}},
        additionalProperties=False,
        dependentRequired={"a": ["b"]},
        dependentSchemas={"c": {"required": ["a"]}},
    ),
    "one required": make_object(
        {"a": BOOLEAN, "b": BOOLEAN},
        additionalProperties=False,
        oneOf=[{"required": ["a"]}, {"required": ["b"]}],
    ),
    "inner of outer": {"oneOf": [NAMED, {**CIRCLE, "additionalProperties": False}]},
    "shorter": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}]},
    "beside anyOf": make_object(
        {"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN},
        additionalProperties=False,
        anyOf=[{"required": ["c"]}, {"required": ["a"]}],
        oneOf=[{"required": ["a"]}, {"required": ["b"]}],
    ),
    "name and pattern": make_object(
        {"a": {"type": "integer", "minimum": 1}},
        required=["a"],
        additionalProperties=False,
        patternProperties={"^a$": {"type": "integer", "maximum": 9}},
    ),
    "pattern of a property": make_object(
        {"size": {"type": "integer"}, "x": BOOLEAN},
        required=["size"],
        additionalProperties=False,
        patternProperties={"e$": {"type": "integer", "maximum": 9}},
    ),
    "pattern of every name": make_object(
        {"a": {"type": ["integer", "null"]}},
        additionalProperties=False,
        patternProperties={".*": {"type": ["integer", "boolean"]}},
    ),
    "patterns of equal schemas": make_object(
        {}, patternProperties={"^a": BOOLEAN, "b$": BOOLEAN}, additionalProperties=False
    ),
    "names of a pattern and properties": make_object(
        {"ab": BOOLEAN, "cd": BOOLEAN}, propertyNames={"pattern": "^a"}, required=["ab"]
    ),
    "names of a reference": {
        **make_object({}, propertyNames={"$ref": "#/$defs/n"}, additionalProperties=BOOLEAN),
        "$defs": {"n": {"type": "string", "enum": ["a", "b"]}},
    },
    "names of alternatives": make_object(
        {}, propertyNames={"anyOf": [{"enum": ["a", "b"]}, {"const": "c"}]}, minProperties=1
    ),
    "names that are not listed": make_object(
        {"a": BOOLEAN, "b": BOOLEAN}, propertyNames={"not": {"enum": ["a", "c"]}}
    ),
    "names without a pattern": make_object(
        {"a": BOOLEAN, "b": BOOLEAN}, propertyNames={"not": {"pattern": "a|[0-9]"}}
    ),
    "one property at least": make_object({"a": BOOLEAN, "b": BOOLEAN}, minProperties=1),
    "two properties at least": make_object(
        {"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN}, minProperties=2, additionalProperties=False
    ),
    "one property at most": make_object(
        {"a": BOOLEAN, "b": BOOLEAN}, maxProperties=1, additionalProperties={"type": "null"}
    ),
    "properties between bounds": make_object(
        {"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN}, required=["b"], minProperties=2, maxProperties=2
    ),
    "one property or no object": {
        "type": ["object", "null"],
        "properties": {"a": BOOLEAN, "b": BOOLEAN},
        "minProperties": 1,
        "additionalProperties": False,
    },
    "unknown format": {"type": "string", "format": "topic", "maxLength": 3},
    "format of other letters": {"type": "string", "format": "Date-Time"},
    "not anything": make_object({"a": {"not": {}}, "b": BOOLEAN}, additionalProperties=False),
    "patterns": {
        "type": "string",
        "maxLength": 3,
        "oneOf": [{"pattern": "^a"}, {"pattern": "^[bc]", "minLength": 2}, {"const": "d"}],
    },
    "required by the whole": make_object(
        {"k": {"enum": ["x", "y"]}},
        required=["k"],
        oneOf=[
            make_object({"k": {"const": "x"}, "a": BOOLEAN}, additionalProperties=False),
            make_object({"k": {"const": "y"}, "b": BOOLEAN}, additionalProperties=False),
        ],
    ),
    "not of a condition that is rewritten": make_object(
        {"k": {"enum": ["x", "yy"]}, "v": BOOLEAN},
        required=["k"],
        additionalProperties=False,
        **{"not": {"not": {"properties": {"k": {"pattern": "^x"}}, "required": ["v"]}}},
    ),
    "pattern of a closed alternative": {
        "oneOf": [
            make_object({}, patternProperties={"^a": BOOLEAN}, additionalProperties=False),
            make_object({"a": BOOLEAN}, required=["a"], maxProperties=1),
        ]
    },
    "patterns of a property": {
        "oneOf": [
            make_object({"k": {"type": "string", "pattern": "^[xy]$"}}, required=["k"]),
            make_object({"k": {"type": "string", "pattern": "^[0-9]$"}}, required=["k"]),
        ]
    },
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
        matcher = build_matcher(known, grammar)
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


@pytest.mark.daily("unique", "three", "not both", "condition", "dependencies", "not a text")
@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_of_rewritten_schemas_satisfy_the_original_schema(name):
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    found = [json.loads(text) for text in texts(schema, 40)]
    assert len(found) > 5
    for value in found:
        validator.validate(value)
    if name in ("unique", "objects", "three", "dependencies", "not both", "one property at least"):
        assert len({json.dumps(value) for value in found}) > 3


def test_schemas_without_an_equivalent_stay_unchanged():
    for schema in (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True},
        {"oneOf": [{}, {}]},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        {"oneOf": [CIRCLE, CIRCLE]},
        {"type": "string", "not": {"pattern": "a"}},
        {"type": "array", "contains": {"type": "string"}},
        {"type": "object", "unevaluatedProperties": False, "allOf": [{}]},
    ):
        assert json.loads(rewritten(json.dumps(schema))) == schema


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bounds", [{}, {"minItems": 15_000}, {"minItems": 2, "maxItems": 30_000}])
def test_unique_arrays_of_too_many_values_stay_as_they_are(bounds):
    schema = {"type": "array", "items": {"enum": [*range(30_000)]}, "uniqueItems": True, **bounds}
    assert json.loads(rewritten(json.dumps(schema))) == schema


FORMATS = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2024-04-31"],
    ),
    "date-time": (["2024-02-29T23:59:59Z"], ["2023-02-29T00:00:00Z", "2024-01-01T24:00:00Z"]),
    "uri-reference": (["", "/a/b?c=d#e", "a", "https://a.b/c", "#x"], ["a b", "<"]),
    "json-pointer": (["", "/a~1b/0"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["/a", "01"]),
    "byte": (["", "QUI=", "QUJD"], ["Q", "QUI"]),
    "url": (["https://a.b/c"], ["x y"]),
    "ip-address": (["127.0.0.1"], ["300.1.1.1"]),
    "password": (["any text"], []),
    "int64": (["-12"], ["x"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_match_the_texts_of_their_definition(name):
    tokenizer = byte_tokenizer()
    serialized = tokenizer.backend_tokenizer.to_str()
    known = make_tokenizer(serialized, len(tokenizer), [tokenizer.eos_token_id])
    schema = {"type": "string", "format": name}
    grammar = grammar_text(("json_schema", json.dumps(schema)))
    for texts_, right in zip(FORMATS[name], (True, False), strict=True):
        for text in texts_:
            matcher = build_matcher(known, grammar)
            tokens = known.tokenize_str(json.dumps(text))
            taken = matcher.try_consume_tokens(tokens) == len(tokens)
            assert (taken and matcher.is_accepting()) is right, text


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    ("keyword", "bound"),
    [
        ("minimum", 2**53 + 1),
        ("exclusiveMinimum", 2**60),
        ("maximum", -(2**53) - 3),
        ("maximum", 10**400),
        ("multipleOf", 2**53 + 1),
    ],
)
def test_bounds_that_are_not_exact_are_refused_with_their_path(keyword, bound, kind):
    schema = make_object({"id": {"type": kind, keyword: bound}})
    with pytest.raises(GrammarError, match=rf"at \$\.properties\.id: .*`{keyword}`"):
        rewritten(json.dumps(schema))


def test_large_bounds_around_exact_numbers_stay_within_the_bounds():
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    result = json.loads(rewritten(json.dumps(schema)))
    assert result == {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1024}


@pytest.mark.parametrize("draft", ["draft-04", "draft-07", "2020-12"])
def test_keywords_beside_a_reference_count_from_the_draft_2019_on(draft):
    inner = {"type": "string", "title": "t", "$ref": "#/definitions/a"}
    schema = {
        "$schema": f"http://json-schema.org/{draft}/schema#",
        **make_object({"k": inner}, required=["k"]),
        "definitions": {"a": BOOLEAN},
    }
    result = json.loads(rewritten(json.dumps(schema)))["properties"]["k"]
    assert ("type" in result) == (draft == "2020-12")


def test_limits_of_properties_with_many_choices_stay_unchanged():
    schema = make_object({f"p{place}": BOOLEAN for place in range(30)}, minProperties=15)
    assert json.loads(rewritten(json.dumps(schema))) == schema
