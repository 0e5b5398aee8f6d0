"""The end-of-answer token of the chat template is an end token of the trained model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from ed_data import train_bpe
from ed_elarge.engine.end_tokens import stop_after_answers
from ed_models.families.llama import LlamaConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    made = train_bpe(["user assistant"] * 3, 262, chat_template=CHATML)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


def ends_of(tokenizer, settings, **config):
    text = None if settings is None else json.dumps(settings)
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 1}
    given = LlamaConfig(**{**tokens, **config})
    model = SimpleNamespace(generation_json=text, config=given)
    stop_after_answers(model, tokenizer)
    return model.generation_json


def test_the_end_of_an_answer_is_added_to_the_end_tokens(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = json.loads(ends_of(tokenizer, None))
    assert settings == {"eos_token_id": [1, end]}
    stored = {"eos_token_id": [1, 2], "temperature": 0.5}
    assert json.loads(ends_of(tokenizer, stored)) == {**stored, "eos_token_id": [1, 2, end]}
    assert json.loads(ends_of(tokenizer, {"temperature": 0.5}))["eos_token_id"] == [1, end]


def test_a_model_that_has_the_end_token_is_unchanged(tokenizer):
    stored = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert ends_of(tokenizer, stored) == json.dumps(stored)
    assert ends_of(tokenizer, None, vocab_size=100) is None


def test_a_tokenizer_without_a_chat_template_changes_nothing():
    assert ends_of(train_bpe(["text"], 259, chat_template=None), None) is None
