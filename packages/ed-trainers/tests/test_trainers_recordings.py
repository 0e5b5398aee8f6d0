"""Batches of `sft` with recordings: items of a prompt, or the input of an encoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from ed_models.families.qwen2_audio import Qwen2AudioForConditionalGeneration
from ed_models.families.whisper import WhisperForConditionalGeneration
from ed_trainers.losses.next_token import reads_sound
from ed_trainers.methods.sft import prepare


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
