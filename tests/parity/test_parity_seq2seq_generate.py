"""`generate` of encoder-decoders returns the tokens of torch `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch
from ed_models import AutoEasyDeLModelForSeq2SeqLM
from ed_models.conformance import ONE, TINY_BART

from tests.conformance.cases import cases

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("parity")]

SMALL = {"vocab_size": 60, "encoder_layers": 2, "decoder_layers": 2}
BART = {**TINY_BART, **SMALL}


def from_cases(model_type: str) -> dict[str, Any]:
    """Return the first conformance case of a family."""
    return dict(next(iter(cases(model_type)[model_type].rows.values())))


FAMILIES = {
    "bart": BART,
    "marian": {
        **BART,
        "pad_token_id": 3,
        "decoder_start_token_id": 3,
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 75,
    },
    "m2m_100": BART,
    "mbart": BART,
    "pegasus": {**BART, "pad_token_id": 3, "decoder_start_token_id": 3},
    **{name: from_cases(name) for name in ("t5", "mt5", "umt5", "longt5", "t5gemma")},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "long beams": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    "short beams": {"num_beams": 4, "length_penalty": -1.0, "early_stopping": "never"},
    "several beams": {"num_beams": 3, "num_return_sequences": 2},
    "first token": {"forced_bos_token_id": 7},
    "last token": {"forced_eos_token_id": 2, "num_beams": 2, "min_length": 5},
    "start": {"decoder_start_token_id": 9},
    "suppressed": {"suppress_tokens": [5, 11, 20], "begin_suppress_tokens": [13, 14]},
    "n-grams": {"no_repeat_ngram_size": 2},
    "new n-grams in beams": {"num_beams": 3, "no_repeat_ngram_size": 2, "length_penalty": 0.6},
    "least new": {"min_new_tokens": 8},
    "n-grams of the source": {"encoder_no_repeat_ngram_size": 2},
    "tokens of the source in beams": {"encoder_no_repeat_ngram_size": 1, "num_beams": 2},
    "like the source": {"encoder_repetition_penalty": 3.0},
    "unlike both": {"encoder_repetition_penalty": 0.5, "repetition_penalty": 1.5},
    "words": {"bad_words_ids": [[5], [6, 7]]},
    "whole length": {"max_length": 12},
    "decay": {"exponential_decay_length_penalty": (3, 1.4)},
    "prompt": {"decoder_input_ids": [8, 9]},
    "prompt in beams": {"decoder_input_ids": [8, 9], "num_beams": 2},
}
LENGTHS = (9, 5, 13)


def made(model_type: str, folder: Path, **stored: Any) -> tuple[Any, Any]:
    """Return torch's model and ours, with random weights and options in generation_config.json."""
    torch = require_torch()
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type])
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config).float()
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad and value.ndim > 1:
                value.normal_(0, 0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0, 0.5)
    model.save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stored}))
    ours = AutoEasyDeLModelForSeq2SeqLM.from_pretrained(folder, sharding_axis_dims=ONE)
    return auto.from_pretrained(folder).eval(), ours


def differences(theirs: Any, ours: Any, model_type: str, **options: Any) -> list[str]:
    """Return the rows that differ; torch generates each row alone, without padding."""
    torch = require_torch()
    rng, pad = np.random.default_rng(3), ours.config.pad_token_id
    rows = [rng.integers(4, 60, n) for n in LENGTHS]
    ids = np.full((len(rows), max(LENGTHS)), pad)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    options = {"max_new_tokens": 14, **options}
    if "max_length" in options:
        del options["max_new_tokens"]
    given: dict[str, Any] = {}
    if "decoder_input_ids" in options:
        start = FAMILIES[model_type].get("decoder_start_token_id", 1)
        given = {"decoder_input_ids": np.array([[start, *options.pop("decoder_input_ids")]] * 3)}
    got = ours.generate(ids, attention_mask=mask.astype(int), **options, **given).sequences
    copies, found = options.get("num_return_sequences", 1), []
    for row, tokens in enumerate(rows):
        arrays = {name: torch.tensor(x[:1]) for name, x in given.items()}
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor(tokens[None]), do_sample=False, **options, **arrays
            )
        for mine, other in zip(got[row * copies :][:copies], expected.tolist(), strict=True):
            # After the end of a row, transformers writes the padding token, or the end token.
            if until_end(mine.tolist()) != until_end(other):
                found.append(f"row {row}: got {mine.tolist()}, expected {other}")
    return found


def until_end(tokens: list[int], end: int = 2) -> list[int]:
    """Return the tokens up to the first end token after the first token."""
    ends = [i for i, token in enumerate(tokens) if token == end and i]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_of_encoder_decoder_match_torch(model_type: str, tmp_path: Path) -> None:
    theirs, ours = made(model_type, tmp_path)
    names = ("greedy", "n-grams of the source") if model_type == "bart" else OPTIONS
    found = {name: differences(theirs, ours, model_type, **OPTIONS[name]) for name in names}
    assert not any(found.values()), {name: rows for name, rows in found.items() if rows}


@pytest.mark.nightly
def test_every_option_of_bart_matches_torch(tmp_path: Path) -> None:
    theirs, ours = made("bart", tmp_path)
    found = {name: differences(theirs, ours, "bart", **own) for name, own in OPTIONS.items()}
    assert not any(found.values()), {name: rows for name, rows in found.items() if rows}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stored",
    [
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 2},
        {"bad_words_ids": [[3], [8, 9]]},
        {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8]},
        {"forced_bos_token_id": 7, "begin_suppress_tokens": [8]},
    ],
    ids=lambda stored: ", ".join(stored),
)
def test_token_rules_of_the_checkpoint_apply(stored: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = made("bart", tmp_path, **stored)
    assert differences(theirs, ours, "bart") == []


@pytest.mark.nightly
def test_rule_with_token_beyond_the_vocabulary_raises_config_error(tmp_path: Path) -> None:
    _, ours = made("bart", tmp_path, forced_bos_token_id=999)
    with pytest.raises(ConfigError, match="forced_bos_token_id has token 999, but the model's"):
        ours.generate([[5, 6]], max_new_tokens=2)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_draws_depend_on_the_seed_and_not_on_other_rows(model_type: str, tmp_path: Path) -> None:
    _, model = made(model_type, tmp_path)
    rows = np.random.default_rng(0).integers(4, 60, (3, 7))
    options: dict[str, Any] = {"do_sample": True, "top_p": 0.9, "max_new_tokens": 10}
    whole = model.generate(rows, seed=4, **options).sequences
    assert (model.generate(rows, seed=4, **options).sequences == whole).all()
    assert (model.generate(rows, seed=5, **options).sequences != whole).any()
    assert (model.generate(rows[:1], seed=4, **options).sequences[0] == whole[0]).all()
