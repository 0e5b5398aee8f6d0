"""Training a tokenizer: lossless, deterministic, loadable, and with a chat template."""

from __future__ import annotations

import pytest
from ed_data import DataError, train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": " how are you? "},
    {"role": "assistant", "content": "fine"},
]


@given(text=st.text())
@settings(deadline=None, max_examples=50)
def test_tokenizer_round_trip_preserves_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    if not any(token in text for token in tokenizer.all_special_tokens):
        assert tokenizer.decode(ids[1:]) == text


def test_train_bpe_is_deterministic(tokenizer):
    texts = ["the cat sat on the mat " * 20, "a dog and a cat " * 30]
    first, second = (train_bpe(texts, 280).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_saved_tokenizer_is_loaded_by_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for name in ("bos_token", "eos_token", "pad_token", "chat_template"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    text = "sheep and goats,  ends\nwith 7."
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_train_bpe_writes_tokenizer_and_chat_template(tmp_path):
    train_bpe(["some text"], 260, save_directory=tmp_path / "tok")
    assert (tmp_path / "tok" / "tokenizer.json").exists()
    assert (tmp_path / "tok" / "chat_template.jinja").exists()


def test_chat_template_prompt_is_a_token_prefix_of_the_chat(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == "<|bos|>system:\nbe kind\nuser:\nhow are you?\nassistant:\nfine<|eos|>"
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)
    # The tokens of a prompt are a prefix of the tokens of the whole chat.
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    part = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert whole[: len(part)] == part


def test_train_bpe_rejects_impossible_vocabulary_and_empty_text():
    with pytest.raises(DataError, match="require at least 259"):
        train_bpe(["text"], 258)
    with pytest.raises(DataError, match="the texts are empty"):
        train_bpe([], 300)


def test_too_little_training_text_logs_smaller_vocabulary(caplog):
    assert len(train_bpe(["abab"], 5000)) < 300
    assert "instead of 5000" in caplog.text
