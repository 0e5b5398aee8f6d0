"""Structured outputs: tokens that the grammar forbids are never sampled, in any batch."""

from __future__ import annotations

import itertools
import json
import random
import re
import string

import numpy as np
import pytest
from ed_esurge import SamplingParams, StructuredOutputs
from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.grammars.store import Grammars
from ed_esurge.runner.guides import Guides
from ed_infra.errors import ConfigError
from pydantic import ValidationError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def params(seed=0, **wanted):
    return SamplingParams(
        max_tokens=60, temperature=1.0, seed=seed, structured_outputs=StructuredOutputs(**wanted)
    )


KINDS = [
    ({"json_schema": json.dumps(SCHEMA)}, r'\{"name": ?"(Ann|Bo)", ?"old": ?(true|false)\}'),
    ({"regex": "[ab]{3}c+d"}, "[ab]{3}c+d"),
    ({"choice": ("yes", 'no "really"\n', "Zürich")}, 'yes|no "really"\n|Zürich'),
    ({"grammar": 'start: "x" inner "y"\ninner: "1" | "2" inner'}, "x2*1y"),
    ({"grammar": 'root ::= "a" b\nb ::= "c" | "d"'}, "a[cd]"),
]


@pytest.mark.parametrize(("wanted", "pattern"), KINDS)
def test_structured_outputs_match_their_grammar(surge, tokenizer, prompts, wanted, pattern):
    free = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=1)
    alone = surge.generate(prompts[2], free)[0].outputs[0]
    traces = surge.stats()["num_compiled"]
    names = {}
    for index, prompt in enumerate(prompts[:6]):
        names[f"g{index}"] = params(index, **wanted)
        surge.add_request(f"g{index}", prompt, names[f"g{index}"])
    surge.add_request("free", prompts[2], free)
    said, reasons, tokens = {name: [] for name in names}, {}, []
    while surge.has_unfinished_requests:
        for output in surge.step():
            out = output.outputs[0]
            if output.request_id == "free":
                tokens += out.token_ids
                continue
            said[output.request_id] += out.token_ids
            reasons[output.request_id] = out.finish_reason
    assert tokens == alone.token_ids  # other requests are unchanged
    assert surge.stats()["num_compiled"] == traces  # masks compile nothing
    for name, ids in said.items():
        if reasons[name] == "stop":
            text = tokenizer.decode(ids[:-1])  # without the end-of-sequence token
            assert re.fullmatch(pattern, text), text
    assert "stop" in reasons.values()


@pytest.mark.nightly
def test_structured_tokens_are_unchanged_by_preemption_and_overlap(llama, tokenizer, prompts):
    from ed_esurge import eSurge

    small = {"max_num_seqs": 4, "page_size": 8, "max_num_batched_tokens": 16, "max_model_len": 64}
    structured = StructuredOutputs(regex="([a-f]{2} )+.")
    wanted = SamplingParams(temperature=0, max_tokens=12, structured_outputs=structured)
    results = []
    for overlap in (False, True):
        engine = eSurge(
            llama,
            tokenizer,
            **small,
            overlap_execution=overlap,
            max_num_seq_buckets=(4,),
            compile_runner=False,
            silent_mode=True,
        )
        for index, prompt in enumerate(prompts[:5]):
            engine.add_request(str(index), prompt, wanted)
        tokens = {str(index): [] for index in range(5)}
        for step in itertools.count():
            for output in engine.step():
                tokens[output.request_id] += output.outputs[0].token_ids
            if not engine.has_unfinished_requests:
                break
            if overlap and step == 4:
                engine.pause()
                engine.resume()
        results.append(tokens)
    assert results[0] == results[1]
    for ids in tokens.values():
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert re.fullmatch("([a-f]{2} )*[a-f]{0,2}.{0,2}", text)
    assert engine.stats()["num_preemptions"] > 0


def test_grammar_constrains_tokens_only_after_reasoning(surge, tokenizer):
    after = tuple(tokenizer("n", add_special_tokens=False)["input_ids"])
    wanted = StructuredOutputs(regex="[xy]{4}", after=("n",))
    grammars = Grammars(tokenizer, 260, [tokenizer.eos_token_id])
    guides = Guides(grammars, 2, 260)
    prompt = tokenizer("a")["input_ids"]
    said = tokenizer("hmm", add_special_tokens=False)["input_ids"]
    guides.start(
        NewSequence(
            "r", 0, [*prompt, *said], len(prompt), SamplingParams(structured_outputs=wanted)
        )
    )
    at = len(prompt) + len(said)
    row = PlanRow("r", 0, at - 1, said[-1:], {}, 1)
    masks = guides.masks(StepPlan(1, (row,)), [0], 2)
    assert masks is not None
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits[0] == 0).tolist() == [tokenizer.eos_token_id]
    assert bits[1].all()
    for token in [*after, *tokenizer("xy", add_special_tokens=False)["input_ids"]]:
        row = PlanRow("r", 0, at, [token], {}, 1)
        at += 1
        guides.grow(row)
        masks = guides.masks(StepPlan(1, (row,)), [0], 2)
        assert masks is not None
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        assert {tokenizer.decode([t]) for t in np.flatnonzero(bits[0, :260])} == {"x", "y"}
        assert bits[1].all()


def test_masks_of_proposals_follow_the_end_of_thoughts(tokenizer):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    wanted = StructuredOutputs(regex="[xy]{4}", after=("no",))
    grammars = Grammars(tokenizer, 260, [tokenizer.eos_token_id])
    guides = Guides(grammars, 1, 260)
    prompt = ids("a")
    guides.start(NewSequence("r", 0, prompt, 1, SamplingParams(structured_outputs=wanted)))
    row = PlanRow("r", 0, 0, [*prompt, *ids("hnox")], {}, 5)
    masks = guides.masks(StepPlan(1, (row,)), [0], 5)
    assert masks is not None
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :260]
    for thoughts in bits[:3]:
        assert np.flatnonzero(thoughts == 0).tolist() == [tokenizer.eos_token_id]
    for answer in bits[3:]:
        assert {tokenizer.decode([t]) for t in np.flatnonzero(answer)} == {"x", "y"}
    # Two proposals are accepted, and another token follows.
    guides.grow(PlanRow("r", 0, 0, [*prompt, *ids("hnox")], {}, 5))
    guides.grow(PlanRow("r", 0, 3, ids("i"), {}, 1))
    masks = guides.masks(StepPlan(2, (PlanRow("r", 0, 3, ids("i"), {}, 1),)), [0], 1)
    assert masks is not None
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[:260]
    assert np.flatnonzero(bits == 0).tolist() == [tokenizer.eos_token_id]


def random_schema(rng, depth=0):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any"]
    kind = rng.choice(kinds + ["object", "array"] * 3 if depth < 3 else kinds)
    words = ["", "a", "ü", '"', "\\", "long name", "\n", "é🌍"]
    match kind:
        case "object":
            names = rng.sample(string.ascii_letters, rng.randrange(4)) + rng.sample(words, 1)
            inner = {name: random_schema(rng, depth + 1) for name in names}
            required = rng.sample(names, rng.randrange(len(names) + 1))
            more = rng.choice([{}, {"additionalProperties": False}])
            return {"type": "object", "properties": inner, "required": required, **more}
        case "array":
            few = {"minItems": rng.randrange(3), "maxItems": rng.randrange(3, 5)}
            return {"type": "array", "items": random_schema(rng, depth + 1), **few}
        case "string":
            return {"type": "string", "maxLength": rng.randrange(20)}
        case "integer":
            return {
                "type": "integer",
                "minimum": rng.randrange(-50, 0),
                "maximum": rng.randrange(99),
            }
        case "enum":
            return {"enum": rng.sample([1, None, True, "x", 2.5, "é"], 3)}
        case "const":
            return {"const": rng.choice(words)}
        case "any":
            options = [random_schema(rng, 3) for _ in range(2)]
            return {"anyOf": options}
    return {"type": kind}


def fits(value, schema):
    """Return whether a value matches a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "object":
            known = schema["properties"]
            closed = schema.get("additionalProperties") is False
            return (
                isinstance(value, dict)
                and value.keys() >= set(schema["required"])
                and all(fits(value[key], known[key]) for key in known.keys() & value.keys())
                and (not closed or value.keys() <= known.keys())
            )
        case "array":
            inside = schema["minItems"] <= len(value) <= schema["maxItems"]
            return inside and all(fits(item, schema["items"]) for item in value)
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return schema["minimum"] <= value <= schema["maximum"] and value == int(value)
        case "number":
            return isinstance(value, int | float)
        case "boolean":
            return isinstance(value, bool)
    return value is None


@pytest.mark.nightly
def test_500_random_schemas_always_parse(tokenizer):
    rng, draw = random.Random(1), np.random.default_rng(1)
    grammars = Grammars(tokenizer, 260, [tokenizer.eos_token_id])
    finished = 0
    for _ in range(500):
        schema = random_schema(rng)
        wanted = SamplingParams(
            structured_outputs=StructuredOutputs(json_schema=json.dumps(schema))
        )
        guides = Guides(grammars, 1, 260)
        guides.start(NewSequence("r", 0, [1], 1, wanted))
        row = PlanRow("r", 0, 0, [1], {}, 1)
        tokens = []
        while len(tokens) < 400:
            masks = guides.masks(StepPlan(1, (row,)), [0], 1)
            assert masks is not None
            bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
            token = int(draw.choice(np.flatnonzero(bits)))
            if token == tokenizer.eos_token_id:
                value = json.loads(tokenizer.decode(tokens))
                assert fits(value, schema), (value, schema)
                finished += 1
                break
            tokens.append(token)
            row = PlanRow("r", 0, len(tokens), [token], {}, 1)
            guides.grow(row)
    assert finished > 450  # the other texts are too long


@pytest.mark.parametrize(
    ("wanted", "fragment"),
    [
        ({"json_schema": '{"type": "thing"}'}, "thing"),
        ({"json_schema": "{"}, "structured output"),
        ({"regex": "(a"}, "structured output"),
        ({"grammar": "start: other"}, "other"),
        ({"grammar": "root ::= other"}, "structured output"),
    ],
)
def test_invalid_grammar_is_rejected_at_submission(surge, wanted, fragment):
    with pytest.raises(ConfigError, match=fragment):
        surge.generate("a", params(**wanted))
    assert not surge.has_unfinished_requests


def test_contradictory_structured_options_raise_validation_error():
    with pytest.raises(ValidationError, match="give one of"):
        StructuredOutputs()
    with pytest.raises(ValidationError, match="give one of"):
        StructuredOutputs(regex="a", grammar="b")
    for more in ({"min_tokens": 1}, {"ignore_eos": True}, {"bad_words": "a"}):
        with pytest.raises(ValidationError, match="drop one"):
            SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **more)


def test_structured_output_requires_a_tokenizer(llama):
    from ed_esurge import eSurge

    engine = eSurge(
        llama, max_num_seqs=2, max_model_len=32, page_size=8, compile_runner=False, silent_mode=True
    )
    with pytest.raises(ConfigError, match="tokenizer"):
        engine.generate([1, 2], params(regex="a"))
