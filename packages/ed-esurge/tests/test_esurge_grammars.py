"""Grammars of clients: hostile grammars are rejected and do not affect other requests."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from ed_esurge import SamplingParams, StructuredOutputs
from ed_esurge.grammars import store
from ed_esurge.grammars.limits import MAX_DEPTH, GrammarError, check_lark, check_schema
from ed_esurge.grammars.reasoning import ThoughtEnds
from ed_esurge.grammars.store import Grammars, GrammarsBusyError
from ed_infra.errors import ConfigError


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 260, [tokenizer.eos_token_id])


def chain(count, inner="{}"):
    """Return a schema of definitions that each refer to the next."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    definitions[f"d{count}"] = json.loads(inner)
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def objects(count):
    """Return a chain of objects that each have a property of the next definition."""
    definitions = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "string"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def rules(count):
    """Return rules in Lark syntax that each refer to the next."""
    lines = [f'r{i}: "a" r{i + 1}' for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "x"'])


def ambiguous(count):
    """Return rules with very many derivations of every text."""
    lines = [f'r{i}: r{i} s | s r{i} | "a"' for i in range(count)]
    return "\n".join(["start: s", "s: " + " | ".join(f"r{i}" for i in range(count)), *lines])


def slow(number=0):
    """Return a schema whose compilation exceeds the time limit of a trial."""
    properties = {f"k{number}_{place}": {"type": "string"} for place in range(7_000)}
    return {"json_schema": json.dumps({"properties": properties})}


ATTACKS = {
    "references": ({"json_schema": chain(3_000)}, "nested 300. levels"),
    "objects": ({"json_schema": objects(1_000)}, "nested 300. levels"),
    "nesting": ({"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "nested too deeply"),
    "constant": ({"json_schema": '{"const":' + "[" * 9_999 + "]" * 9_999 + "}"}, "too deeply"),
    "rules": ({"grammar": rules(3_000)}, "nested 3002 levels"),
    "gbnf": (
        {"grammar": rules(3_000).replace(":", " ::=").replace("start", "root")},
        "levels|within",
    ),
    "lark json": ({"grammar": 'start: %json {"items":' + '{"items":' * 3_000}, "levels"),
    "parentheses": ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "nested parentheses"),
    "brackets": ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "levels"),
    "repetition": ({"grammar": 'start: ("a" "b"){1000000}'}, "too complex"),
    "ambiguous": ({"grammar": ambiguous(300)}, "too complex"),
    "endless": ({"grammar": "start: a\na: a"}, "no text satisfies"),
    "divisor": ({"json_schema": '{"type":"integer","multipleOf":1000000007}'}, "too complex"),
    "long": (slow(), "within 2 s of processor time"),
    "long text": (
        {"json_schema": json.dumps({"enum": ["v" * 200_000]})},
        "too complex|within 2 s",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.daily("references", "parentheses", "divisor")
def test_hostile_grammars_are_rejected_and_the_worker_survives(grammars, name):
    wanted, fragment = ATTACKS[name]
    with pytest.raises(ConfigError, match=fragment):
        grammars.submit(StructuredOutputs(**wanted)).result(60)
    pid = worker(grammars)
    assert grammars.submit(StructuredOutputs(regex=f"{name}?")).result(60)
    assert worker(grammars) == pid


HARMLESS = {
    "chain": {"json_schema": chain(1_000)},
    "rules": {"grammar": rules(MAX_DEPTH - 4)},
    "recursive": {"json_schema": '{"type":"array","items":{"$ref":"#"}}'},
    "count": {"json_schema": '{"type":"array","maxItems":1000000000}'},
    "length": {"json_schema": '{"type":"string","maxLength":1000000000}'},
    "expanding": {"regex": "(a|b)*a(a|b){30}"},
    "many choices": {"choice": tuple(f"answer {i}" for i in range(1024))},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_large_grammars_within_the_limits_compile(grammars, name):
    matcher = grammars.submit(StructuredOutputs(**HARMLESS[name])).result(60).matcher()
    assert any(matcher.compute_bitmask())
    assert not matcher.is_error()


def worker(grammars):
    return grammars._prepare_backend()[1].pid


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_crash_of_a_trial_or_worker_fails_only_its_request(grammars):
    assert grammars.submit(StructuredOutputs(regex="warm")).result(60)
    crashed = grammars.submit(StructuredOutputs(**slow(1)))
    while not (trials := children(worker(grammars))):
        time.sleep(0.01)
    os.kill(trials[0], signal.SIGSEGV)
    with pytest.raises(ConfigError, match="could not be compiled"):
        crashed.result(60)
    before = worker(grammars)
    lost = grammars.submit(StructuredOutputs(**slow(2)))
    os.kill(before, signal.SIGKILL)
    with pytest.raises(ConfigError, match="ended"):
        lost.result(60)
    assert grammars.submit(StructuredOutputs(regex="again")).result(60)
    assert worker(grammars) != before


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_grammar_whose_trial_runs_out_of_time_is_tried_again(grammars):
    assert grammars.submit(StructuredOutputs(regex="warm")).result(60)
    schema = {"properties": {f"k{place}": {"type": "string"} for place in range(1_500)}}
    result = grammars.submit(StructuredOutputs(json_schema=json.dumps(schema)))
    while not (trials := children(worker(grammars))):
        time.sleep(0.001)
    os.kill(trials[0], signal.SIGPROF)  # the signal of the limit of processor time
    assert result.result(60)


def test_harmless_grammar_does_not_wait_for_hostile_grammars(tokenizer):
    own = Grammars(tokenizer, 260, [])
    hostile = [own.submit(StructuredOutputs(**slow(10 + i))) for i in range(6)]
    assert own.submit(StructuredOutputs(regex="harmless")).result(60)
    assert not all(one.done() for one in hostile)
    os.kill(worker(own), signal.SIGKILL)
    for one in hostile:
        assert isinstance(one.exception(60), ConfigError)


@pytest.mark.nightly
def test_number_of_queued_grammars_is_limited(grammars, monkeypatch):
    monkeypatch.setattr(store, "MAX_WAITING", 1)
    waiting = grammars.submit(StructuredOutputs(**slow(30)))
    with pytest.raises(GrammarsBusyError, match="wait to be compiled"):
        grammars.submit(StructuredOutputs(regex="second"))
    assert grammars.submit(StructuredOutputs(**slow(30))) is waiting
    assert waiting.exception(60) is not None
    assert grammars.submit(StructuredOutputs(regex="second")).result(60)


def test_compiled_grammars_are_shared_and_kept_while_in_use(tokenizer, monkeypatch):
    monkeypatch.setattr(store, "KEPT", 2)
    grammars = Grammars(tokenizer, 260, [tokenizer.eos_token_id])
    wanted = [StructuredOutputs(regex=f"a{i}") for i in range(5)]
    held = grammars.submit(wanted[0]).result(60)
    assert grammars.submit(wanted[0].replace(after=("</think>",))).result(60) is held
    dropped = id(grammars.submit(wanted[1]).result(60))
    for one in wanted[2:]:
        grammars.submit(one).result(60)
    assert len(grammars._known) == 3
    assert grammars.get(wanted[0]) is held
    assert wanted[1].regex not in {content for _, content in grammars._known}
    assert dropped


def test_server_without_grammars_starts_no_process(tokenizer):
    grammars = Grammars(tokenizer, 260, [])
    assert grammars._made is None


@pytest.mark.nightly
def test_worker_ends_with_the_engine(tokenizer):
    grammars = Grammars(tokenizer, 260, [])
    grammars.submit(StructuredOutputs(regex="a")).result(60)
    process = grammars._prepare_backend()[1]._connection.process
    assert process.poll() is None
    del grammars
    gc.collect()
    assert process.wait(20) == 0


@pytest.mark.nightly
def test_request_whose_grammar_exceeds_a_step_fails_alone(surge, prompts):
    free = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    alone = surge.generate(prompts[2], free)[0].outputs[0]
    # The trial generates 32 tokens, so the costly rule begins later.
    costly = ambiguous(300).replace("start: s", "start: /[xy]{40}/ s")
    hidden = StructuredOutputs(grammar=costly)
    guided = SamplingParams(max_tokens=60, temperature=1.0, structured_outputs=hidden)
    surge.add_request("free", prompts[2], free)
    surge.add_request("guided", prompts[1], guided)
    tokens, error = [], None
    while surge.has_unfinished_requests:
        for output in surge.step():
            if output.request_id == "free":
                tokens += output.outputs[0].token_ids
            elif output.finished:
                assert output.outputs[0].finish_reason == "error"
                error = output.error
    assert tokens == alone.token_ids
    assert "exceeds the limits of one step" in error


@pytest.mark.parametrize(
    ("schema", "fragment"),
    [
        (
            {"properties": {"a": {"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}},
            r"at \$\.properties\.a\.items: `oneOf` is supported only where",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"anyOf": [{"type": "thing"}]}},
            },
            r"at \$\.\$defs\.x\.anyOf\[0\]: the type 'thing' is unknown",
        ),
        (
            {"properties": {"a": {"type": "array", "uniqueItems": True}}},
            r'at \$\.properties\.a: the keywords "uniqueItems" are not supported',
        ),
        ({"properties": {"a": {"$ref": "#/$defs/y"}}}, r"at \$\.properties\.a: the reference"),
        ({"properties": {"a": {"format": "colour"}}}, r"at \$\.properties\.a: the format 'colour'"),
        ({"minLength": 3, "maxLength": 2, "type": "string"}, r"at \$: no value satisfies"),
        ({"minimum": -(10**300), "maximum": 10**300, "type": "integer"}, r"at \$: the range of n"),
        ({"properties": {"a": {"$ref": "http://other.test/x"}}}, r"at \$\.properties\.a: the ref"),
    ],
)
def test_schema_error_names_the_path_and_a_solution(grammars, schema, fragment):
    wanted = StructuredOutputs(json_schema=json.dumps({"type": "object", **schema}))
    with pytest.raises(ConfigError, match=fragment) as error:
        grammars.submit(wanted).result(60)
    for internal in ("coerce_one_of", "llguidance", "Unimplemented", "Some(", "<state>"):
        assert internal not in str(error.value)


def test_grammar_depth_limit_counts_references():
    check_schema(chain(MAX_DEPTH - 50))
    for text in (chain(MAX_DEPTH), objects(MAX_DEPTH // 3)):
        with pytest.raises(GrammarError, match="along its references"):
            check_schema(text)
    check_lark('start: "(((((" /[(((]/ // (((\n' + "x: start\n" * 5_000)
    with pytest.raises(GrammarError, match="levels deep"):
        check_lark("start: b\nb: a\n?a[lazy]: " + "(" * MAX_DEPTH)


# ---- thoughts


def bits(mask):
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


@pytest.fixture(scope="module")
def merging():
    """A tokenizer in llguidance's format. Tokens of several letters overlap the end of thoughts,
    and some extend beyond this end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["</", "think", "thi", ">{", ">ĊĊ", "nk", "!</think>x"]
    vocabulary = {word: place for place, word in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    from ed_esurge.grammars.build import make_tokenizer

    size = tokenizer.get_vocab_size()
    made = make_tokenizer(tokenizer.to_str(), size, [tokenizer.token_to_id("</s>")])
    ends = ThoughtEnds(["</think>"], made, size, [tokenizer.token_to_id("</s>")])
    return tokenizer.token_to_id, ends


@pytest.mark.parametrize(
    "spelled", [["</", "think", ">"], ["<", "/", "thi", "nk", ">ĊĊ"], [*"</think>"]]
)
def test_end_of_reasoning_is_found_in_any_tokenization(merging, spelled):
    number, ends = merging
    tail = b""
    for token in ["a", "</", "thi", *spelled]:
        assert tail is not None
        allowed = bits(ends.mask(tail))
        assert not allowed[number("</s>")]
        assert not allowed[number("!</think>x")]
        assert allowed[number(">")]
        assert allowed[number(">ĊĊ")]
        # The rest of this token would begin an unconstrained answer.
        assert allowed[number(">{")] == (not tail.endswith(b"</think"))
        tail = ends.advance(tail, number(token))
    assert tail is None


@pytest.fixture(scope="module")
def thinking(llama, tokenizer):
    """An engine with four further end-of-sequence tokens: the letters c to f."""
    from ed_esurge import eSurge

    return eSurge(
        llama,
        tokenizer,
        max_num_seqs=8,
        max_model_len=64,
        page_size=8,
        max_num_batched_tokens=32,
        compile_runner=False,
        silent_mode=True,
        extra_eos_token_ids=tuple(tokenizer(c)["input_ids"][1] for c in "cdef"),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["b", "ab", "bab"])
def test_constrained_answer_never_ends_within_thoughts(thinking, tokenizer, text):
    likely = {tokenizer(letter)["input_ids"][1]: 30 for letter in "abcdef"}
    wanted = StructuredOutputs(regex="(xy){2}", after=(text,))
    params = SamplingParams(
        max_tokens=40, temperature=3.0, seed=1, n=8, logit_bias=likely, structured_outputs=wanted
    )
    reasons = []
    for out in thinking.generate("x", params)[0].outputs:
        thoughts, end, answer = out.text.partition(text)
        reasons.append(out.finish_reason)
        if out.finish_reason == "stop":
            assert end
            assert answer == "xyxy"
        else:
            assert not end or "xyxy".startswith(answer)
        assert not set("cdef") & set(thoughts)
    assert "stop" in reasons
