"""Token bytes and texts for both byte representations of vocabularies."""

from __future__ import annotations

import math

import pytest
from ed_esurge.outputs import Logprob
from ed_esurge.server.generation.logprobs import (
    CompletionLogprobs,
    TokenTexts,
    chat_logprobs,
    join_logprobs,
)
from ed_esurge.testing import byte_tokenizer


def sentencepiece_like():
    """A tokenizer with `▁` for spaces, and `<0x..>` for other bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "H", "i", "▁H", "▁Hi"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "H"), ("▁H", "i")]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), sentencepiece_like()])
@pytest.mark.parametrize("text", ["Hi é", "世界", "a\n\tb", "🌍"])
def test_joined_token_bytes_equal_the_text(tokenizer, text):
    texts = TokenTexts(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(map(texts.get_bytes, tokens)).decode().removeprefix(" ") == text


def test_token_texts_decode_sentencepiece_tokens():
    tokenizer = sentencepiece_like()
    texts = TokenTexts(tokenizer)
    number = tokenizer.convert_tokens_to_ids
    assert texts.get_text(number("▁Hi")) == " Hi"
    assert texts.get_text(number("<0x0A>")) == "\n"
    assert texts.get_text(number("<0xE4>")) == "bytes:\\xe4"
    assert texts.get_text(number("</s>")) == "</s>"
    assert texts.is_special(number("</s>"))
    assert not texts.is_special(number("H"))
    # The vocabulary of the model can be larger than the tokenizer's.
    assert texts.get_text(10_000) == ""


def test_impossible_tokens_have_a_finite_logprob():
    texts = TokenTexts(byte_tokenizer())
    position = {65: Logprob(-math.inf, rank=258), 66: Logprob(0.0, rank=1)}
    entry = chat_logprobs(texts, [65], [position], 1)["content"][0]
    assert entry["logprob"] == -9999.0
    assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0]


def test_joined_logprobs_of_chunks_equal_those_of_the_answer():
    texts = TokenTexts(byte_tokenizer())
    tokens = byte_tokenizer()("aé🌍b", add_special_tokens=False)["input_ids"]
    scores = [{token: Logprob(-1.0, rank=1)} for token in tokens]
    whole = CompletionLogprobs(texts, 1).completion(tokens, scores)
    writer = CompletionLogprobs(texts, 1)
    parts = [writer.completion([t], [s]) for t, s in zip(tokens, scores, strict=True)]
    assert join_logprobs(parts) == whole
    assert whole["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
