"""Recordings in prompts: the engine produces the tokens of `generate` (Voxtral)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_esurge import eSurge
from ed_esurge.model import placed_items
from ed_infra.errors import ConfigError
from image_requests import answers

TEXT = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
AUDIO = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_mel_bins": 6,
    "max_source_positions": 8,
    "initializer_range": 0.3,
}
TOKEN, FEATURES = 159, 4


@pytest.fixture(scope="module")
def model() -> Any:
    from ed_models.families.voxtral import VoxtralConfig, VoxtralForConditionalGeneration

    config = VoxtralConfig(
        text_config=TEXT,
        audio_config=AUDIO,
        audio_token_id=TOKEN,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return VoxtralForConditionalGeneration.create(config, seed=3)


@pytest.fixture(scope="module")
def engine(model: Any) -> eSurge:
    """An engine whose chunks split the recordings, and whose pages do not hold all requests."""
    options: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_seq_buckets": (3,),
        "page_size": 8,
        "num_pages": 14,
        "max_num_batched_tokens": 11,
        "max_model_len": 64,
        "compile_runner": False,
        "silent_mode": True,
    }
    return eSurge(model, **options)


def prompt(engine: eSurge, seed: int, *starts: int) -> tuple[list[int], Any, Any]:
    """Token ids, and the arrays and items of recordings at these places."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 150, size=40).tolist()
    for start in starts:
        ids[start : start + FEATURES] = [TOKEN] * FEATURES
    sounds = rng.normal(size=(max(1, len(starts)), 6, 16)).astype(np.float32)
    items = engine.loop.runner.items
    assert items is not None
    found = placed_items(items, {"input_features": sounds}, ids, {TOKEN})
    assert [item.start for item in found] == list(starts)
    return ids, {"input_features": sounds[None]} if starts else {}, found


@pytest.mark.nightly
def test_prompts_with_0_1_and_3_recordings_produce_tokens_of_generate(model, engine):
    cases = [prompt(engine, 1, 2, 20), prompt(engine, 2, 5), prompt(engine, 3)]
    cases.append(prompt(engine, 4, 1, 5, 30))
    wanted = []
    for ids, arrays, _ in cases:
        out = model.generate(np.array([ids]), max_new_tokens=10, eos_token_id=[], **arrays)
        wanted.append(out.sequences[0, len(ids) :].tolist())
    assert answers(engine, cases) == wanted
    assert len({*map(tuple, wanted)}) == len(wanted)


@pytest.mark.nightly
def test_placeholders_without_recordings_are_an_error(engine):
    items = engine.loop.runner.items
    sounds = {"input_features": np.zeros((1, 6, 16), np.float32)}
    with pytest.raises(ConfigError, match=r"8 placeholder tokens \[159\], but its items have 4"):
        placed_items(items, sounds, [TOKEN] * 8, {TOKEN})
