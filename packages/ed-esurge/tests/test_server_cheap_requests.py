"""Requests have costs of their size: they copy no vocabulary, create no document again, and grow
texts and match results in linear time."""

from __future__ import annotations

import httpx
import pytest
from ed_esurge.frontends.ollama.replies import ReplyLine
from ed_esurge.frontends.ollama.requests import (
    FunctionOfCall,
    OllamaCall,
    OllamaMessage,
    chat_messages,
)
from ed_esurge.outputs import CompletionOutput
from ed_esurge.replies.blocks import BlockTracker
from ed_esurge.replies.events import (
    CallArguments,
    CallBegins,
    CallBroken,
    CallEnds,
    Reasoning,
    Reply,
    ReplyText,
)
from ed_esurge.replies.parser import ReplyParser
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.scanner import Scanner
from ed_esurge.server import openapi
from ed_esurge.server.generation.infilling import INFILL_FORMATS, InfillPrompts, infill_tokens
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_esurge.tokenizer import LONG_DECODING
from hypothesis import given
from hypothesis import strategies as st

FORM = INFILL_FORMATS["qwen2.5-coder"]
TOKENS = [FORM.prefix, FORM.suffix, FORM.middle, FORM.repository, FORM.file]


def infill_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.add_tokens(["plainadded"])
    return tokenizer


class Copies:
    """Counts the calls that copy a vocabulary, in Python or in Rust."""

    def __init__(self, monkeypatch, tokenizer) -> None:
        self.count = 0
        kind, backend = type(tokenizer), tokenizer._tokenizer
        for name in ("get_vocab", "get_added_vocab"):
            monkeypatch.setattr(kind, name, self._wrap(getattr(kind, name)))
        for name in ("to_str", "get_vocab", "save"):
            setattr(backend, name, self._wrap(getattr(backend, name)))

    def _wrap(self, function):
        def counted(*args, **options):
            self.count += 1
            return function(*args, **options)

        return counted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}),
        (
            "/infill",
            {
                "input_prefix": "a",
                "input_suffix": "b",
                "n_predict": 1,
                "input_extra": [{"filename": "f", "text": "x"}],
            },
        ),
        ("/api/generate", {"model": "scripted", "prompt": "a", "suffix": "b", "stream": False}),
        ("/api/show", {"model": "scripted"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "</s>"}]}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logprobs": 1}),
    ],
)
def test_requests_do_not_copy_the_vocabulary(monkeypatch, path, body):
    engine = ScriptedEngine()
    engine.tokenizer = infill_tokenizer()
    engine.vocab_size = len(engine.tokenizer)
    with background(engine) as url:
        copies = Copies(monkeypatch, engine.tokenizer)
        for _ in range(2):
            answer = httpx.post(url.removesuffix("/v1") + path, json=body)
            assert answer.status_code == 200, answer.text
        assert copies.count == 0


def test_long_texts_are_decoded_without_the_lock_of_the_interpreter(monkeypatch):
    """`Tokenizer.decode` holds the lock for a third of a second, `decode_batch` does not."""
    tokenizer = infill_tokenizer()
    tokens = tokenizer("</s> plainadded é🌍 " * LONG_DECODING)["input_ids"]
    short, expected = tokens[:100], tokenizer.decode(tokens)
    engine = ScriptedEngine(tokenizer=tokenizer)
    with background(engine) as url:
        address = url.replace("/v1", "/detokenize")
        copies = Copies(monkeypatch, tokenizer)
        decode = tokenizer._tokenizer.decode
        tokenizer._tokenizer.decode = copies._wrap(decode)
        assert httpx.post(address, json={"tokens": tokens}).json()["prompt"] == expected
        assert copies.count == 0
        assert httpx.post(address, json={"tokens": short}).json()["prompt"] == decode(
            short, skip_special_tokens=False
        )


def test_shared_copy_encodes_as_a_complete_copy():
    tokenizer = infill_tokenizer()
    original = tokenizer._tokenizer
    complete = type(original).from_str(original.to_str())
    complete.encode_special_tokens = True
    template = ChatTemplate(tokenizer, "")
    for text in ("a", "<|fim_prefix|>", "x plainadded </s> <s>y", "ä€<|fim_middle|>\n"):
        assert template.as_text(text) == complete.encode(text, add_special_tokens=False).ids
    assert tokenizer("</s>", add_special_tokens=False)["input_ids"] == [tokenizer.eos_token_id]


def test_gap_prompt_has_the_special_tokens_once():
    tokenizer = infill_tokenizer()
    prompts = InfillPrompts(tokenizer)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in TOKENS}
    tokens = prompts.build("a<|fim_suffix|>", "b", [("f", "c")])
    for token in (FORM.prefix, FORM.suffix, FORM.middle, FORM.repository):
        assert tokens.count(ids[token]) == 1
    assert tokens[-1] == ids[FORM.middle]
    assert infill_tokens(byte_tokenizer()) is None
    for name, form in INFILL_FORMATS.items():
        known = byte_tokenizer()
        names = [*filter(None, (form.prefix, form.suffix, form.middle, form.repository, form.file))]
        known.add_special_tokens({"additional_special_tokens": names})
        assert infill_tokens(known) == form, name


def test_document_is_created_once_for_all_requests(monkeypatch):
    """The creation takes a quarter of a second, and any key may request the document."""
    calls = []
    document = openapi.document

    def counted(version):
        calls.append(version)
        return document(version)

    monkeypatch.setattr(openapi, "document", counted)
    openapi._render.cache_clear()
    with background(ScriptedEngine()) as url:
        address = url.replace("/v1", "/openapi.json")
        answers = [httpx.get(address) for _ in range(10)]
    assert len(calls) == 1
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json() == document(calls[0])


#: A text, and a number of later pieces. A copy of the text for each piece would take minutes.
LONG, PIECES = 2**26, 10_000


def grow_completion(pieces):
    whole = CompletionOutput(0)
    for piece in pieces:
        whole.add(CompletionOutput(0, piece))
    return whole.text


def grow_reply(kind):
    def grow(pieces):
        reply = Reply().add([CallBegins(0, "a", "f")])
        for piece in pieces:
            reply.add([CallArguments(0, piece) if kind is CallArguments else kind(piece)])
        return reply.content or reply.reasoning or reply.calls[0].arguments

    return grow


def grow_block(pieces):
    tracker = BlockTracker()
    for piece in pieces:
        tracker.take([ReplyText(piece)])
    return tracker.whole[0].text


def grow_line(pieces):
    whole = ReplyLine()
    for piece in pieces:
        whole.add(ReplyLine(content=piece, thinking=piece))
    assert whole.content == whole.thinking
    return whole.content


def grow_scanner(pieces):
    scanner = Scanner()
    scanner.mark = 0
    for piece in pieces:
        scanner.feed(piece)
    return scanner.text


def grow_space(inside):
    def grow(pieces):
        parser = ReplyParser(reasoning=REASONING_FORMATS["deepseek_r1"], inside=inside)
        events = parser.feed("a")
        for piece in pieces:
            events += parser.feed(piece.replace("a", " "))
        events += parser.feed("b")
        return "".join(event.text for event in events)[1:-1].replace(" ", "a")

    return grow


@pytest.mark.timeout(60)
@pytest.mark.daily("completion", "call")
@pytest.mark.parametrize(
    "grow",
    [
        grow_completion,
        grow_reply(ReplyText),
        grow_reply(Reasoning),
        grow_reply(CallArguments),
        grow_block,
        grow_line,
        grow_scanner,
        grow_space(False),
        grow_space(True),
    ],
    ids=[
        "completion",
        "content",
        "reasoning",
        "arguments",
        "block",
        "line",
        "call",
        "space",
        "gap",
    ],
)
def test_long_texts_grow_without_copies(grow):
    text = grow(["a" * LONG, *["a"] * PIECES])
    assert len(text) == LONG + PIECES
    assert text.count("a") == len(text)


@pytest.mark.timeout(60)
def test_results_of_many_ollama_calls_are_matched_in_linear_time():
    count = 30_000
    call = OllamaCall(function=FunctionOfCall(name="f"))
    sent = [OllamaMessage.model_construct(role="assistant", tool_calls=[call] * count, content="")]
    sent += [OllamaMessage(role="tool", content="a", tool_name="g")] * count
    ids = [message["tool_call_id"] for message in chat_messages(sent)[1:]]
    assert ids == [f"call_0_{number}" for number in range(count)]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([None, "", "f", "g"])), max_size=12))
def test_ollama_results_belong_to_their_calls(turns):
    """Compares with a search through all calls without results."""
    sent, waiting, expected = [], [], []
    for place, (is_call, name) in enumerate(turns):
        if is_call:
            sent.append(
                OllamaMessage(
                    role="assistant",
                    tool_calls=[OllamaCall(function=FunctionOfCall(name=name or "f"))],
                )
            )
            waiting.append((f"call_{place}_0", name or "f"))
            continue
        sent.append(OllamaMessage(role="tool", tool_name=name))
        named = [one for one in waiting if one[1] == name] or waiting or [(f"call_{place}", "")]
        expected.append(named[0][0])
        waiting = [one for one in waiting if one[0] != named[0][0]]
    results = [message for message in chat_messages(sent) if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in results] == expected


@given(st.lists(st.sampled_from("tTrcb"), max_size=12))
def test_blocks_continue_earlier_blocks_of_their_kind(letters):
    """Compares with a search through all earlier blocks."""
    tracker, changes = BlockTracker(), []
    for number, letter in enumerate(letters):
        begins = [CallBegins(number, "a", "f")]
        events = {
            "t": [ReplyText("a")],
            "T": [ReplyText("")],
            "r": [Reasoning("a")],
            "c": [*begins, CallEnds(number)],
            "b": [*begins, CallBroken(number)],
        }
        changes += tracker.take(events[letter])
    changes += tracker.end()
    for change in changes:
        if change.kind == "opens":
            earlier = [one for one in tracker.whole if one.index < change.block.index]
            kinds = [one.kind for one in earlier if one.text or one.kind == "call"]
            expected = change.block.kind in kinds and kinds[-1] != change.block.kind
            assert change.block.continues == expected
