"""Batches of `sft` with recordings: items of a prompt, or the input of an encoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_models.families.qwen2_audio import Qwen2AudioForConditionalGeneration
from ed_models.families.whisper import WhisperForConditionalGeneration
from ed_trainers.losses.next_token import reads_sound
from ed_trainers.methods.sft import prepare
from ed_trainers.methods.transcripts import count_errors


def test_recordings_of_prompts_are_kept_and_tokens_are_targets() -> None:
    run: Any = SimpleNamespace(
        learner=SimpleNamespace(input_names=Qwen2AudioForConditionalGeneration.input_names)
    )
    assert not reads_sound(run.learner)
    sounds = np.random.default_rng(0).normal(size=(1, 2, 4, 8)).astype(np.float32)
    mask = np.ones((1, 2, 8), np.int32)
    batch = {
        "input_ids": np.array([[9, 9, 3, 4, 9, 5]]),
        "labels": np.array([[-100, -100, 3, 4, -100, 5]]),
        "segment_ids": np.array([[1, 1, 1, 1, 2, 2]]),
        "input_features": sounds,
        "feature_attention_mask": mask,
    }
    made: Any = prepare(run, batch)
    assert np.array_equal(made["input_features"], sounds)
    assert np.array_equal(made["feature_attention_mask"], mask)
    assert made.get_logical_axes("input_features") == ("batch", None, None, None)
    assert made["targets"].tolist() == [[0, 3, 4, 0, 5, 0]]
    assert made["weights"].tolist() == [[0, 1, 1, 0, 1, 0]]


def test_encoder_of_whisper_reads_sound_instead_of_tokens() -> None:
    model: Any = WhisperForConditionalGeneration
    assert reads_sound(model)


class Scribe:
    """A model that writes one word too much in each transcript of a recording."""

    input_names = ("input_features", "decoder_input_ids")
    generation_json = '{"decoder_start_token_id": 7, "suppress_tokens": [3]}'
    config = SimpleNamespace(eos_token_id=0, max_position_embeddings=16)

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def generate(self, **options: Any) -> Any:
        self.calls.append(options)
        values = options["inputs"]["input_features"]
        rows = [[7, int(value), 5, 0, 9, 9] for value in values[:, 0]]
        return SimpleNamespace(sequences=np.asarray(rows))


class Words:
    """A tokenizer whose tokens are words."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(f"w{token}" for token in tokens if token not in (0, 7))


@pytest.mark.parametrize(
    ("limit", "rows"), [(None, [2, 2, 1]), (3, [2, 1]), (2, [2]), (9, [2, 2, 1])]
)
def test_errors_of_the_first_recordings_are_counted(limit: int | None, rows: list[int]) -> None:
    batches = [
        {
            "input_features": np.arange(first, last)[:, None],
            "labels": np.stack([np.array([-100, n, 6, 0]) for n in range(first, last)]),
        }
        for first, last in ((11, 13), (13, 15), (15, 16))
    ]
    batches[0]["labels"][1] = -100  # a row of padding
    model: Any = Scribe()
    rates = count_errors(model, batches, SimpleNamespace(tokenizer=Words()), limit=limit)
    assert [len(call["decoder_input_ids"]) for call in model.calls] == rows
    assert all(call["suppress_tokens"] == [3] for call in model.calls)
    assert all(call["max_new_tokens"] == 15 for call in model.calls)
    assert (rates.word_edits, rates.words) == (sum(rows) - 1, 2 * (sum(rows) - 1))
