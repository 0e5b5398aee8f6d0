"""Small requests have small costs: they copy no vocabulary, and create no document again."""

from __future__ import annotations

import httpx
import pytest
from ed_esurge.server import openapi
from ed_esurge.server.generation.infilling import INFILL_FORMATS, InfillPrompts, infill_tokens
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import ScriptedEngine, byte_tokenizer

FORM = INFILL_FORMATS["qwen2.5-coder"]
TOKENS = [FORM.prefix, FORM.suffix, FORM.middle, FORM.repository, FORM.file]


def infill_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.add_tokens(["plainadded"])
    return tokenizer


class Copies:
    """Counts the calls that copy a vocabulary."""

    def __init__(self, monkeypatch, tokenizer) -> None:
        self.count = 0
        kind = type(tokenizer)
        for name in ("get_vocab", "get_added_vocab"):
            monkeypatch.setattr(kind, name, self._wrap(getattr(kind, name)))

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
        texts = []
        backend = type(engine.tokenizer._tokenizer)
        monkeypatch.setattr(
            "ed_esurge.template._copy_tokenizer", lambda original: texts.append(1) or original
        )
        assert backend is not None
        for _ in range(3):
            answer = httpx.post(url.removesuffix("/v1") + path, json=body)
            assert answer.status_code == 200, answer.text
        assert copies.count == 0
        assert len(texts) <= 1  # the first request creates a copy, which shares the vocabulary


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
