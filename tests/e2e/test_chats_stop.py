"""A model that was trained on chats ends its answers, with every chat template."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ed_elarge import eLargeModel

from tests.parity.chat_families import AGAIN, ANSWER, FAMILIES, SIX, USER

STEPS = 150
#: The template that is not nightly: it has no end token.
DEFAULT = "without_end"


def trained_prompt(tokenizer, question, chat) -> list[int]:
    """Return the prompt of an answer, without a thought that only this prompt contains."""
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(chat)["input_ids"]
    shared = zip(prompt, whole, strict=False)
    return prompt[: next((i for i, (a, b) in enumerate(shared) if a != b), len(prompt))]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == DEFAULT else pytest.mark.nightly) for n in FAMILIES]
)
def test_model_trained_on_chats_generates_end_token(tmp_path, monkeypatch, name):
    """With the loss only on answers, the model generates the answer and its end token."""
    monkeypatch.chdir(tmp_path)
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    tokenizer.save_pretrained("tokenizer")
    chats = [[USER, ANSWER], [AGAIN, SIX]]
    with open("chats.jsonl", "w") as stream:
        stream.writelines(json.dumps({"messages": chat}) + "\n" for chat in chats)
    longest = max(len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in chats) + 1
    run = eLargeModel(
        {
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 512,
                },
                "tokenizer": "tokenizer",
            },
            "mixture": {
                "informs": [{"data_files": "chats.jsonl", "content_field": "messages"}],
                "tokenization": {"assistant_only_loss": True, "max_length": longest},
                "cache_dir": "cache",
            },
            "trainer": {
                "trainer_type": "sft",
                "max_training_steps": STEPS,
                "total_batch_size": 2,
                "learning_rate": 5e-3,
                "save_directory": "run",
                "use_tensorboard": False,
                "progress_bar_type": "none",
            },
        }
    )
    run.train()
    model = run.build_trainer().model
    for question, answer in chats:
        prompt = trained_prompt(tokenizer, [question], [question, answer])
        output = model.generate(np.asarray([prompt]), max_new_tokens=30, do_sample=False)
        answered = output.sequences[0, len(prompt) :].tolist()
        end = tokenizer.convert_tokens_to_ids(family.end or family.eos)
        assert end in answered, f"no end within 30 tokens: {tokenizer.decode(answered)!r}"
        text = tokenizer.decode(answered[: answered.index(end)])
        assert text.strip().endswith(answer["content"])
        rest = set(answered[answered.index(end) + 1 :])
        assert len(rest) <= 1, "the tokens after the end must be padding"
