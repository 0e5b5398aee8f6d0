"""Greedy tokens of every encoder-decoder family equal those of transformers, with the rules of the
checkpoint for forced and suppressed tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.core.commands import TokenRules
from ed_esurge.core.request import Request
from ed_esurge.server import background
from ed_esurge.testing import byte_tokenizer
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch

VOCAB, POSITIONS, NEW = 260, 64, 10
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": POSITIONS,
    "init_std": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_factor": 3.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
#: Class of transformers -> fields of its configuration, and the generation settings.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Bart": (BART, {"forced_bos_token_id": 0, "forced_eos_token_id": 2}),
    "MBart": (BART, {"forced_bos_token_id": 7, "forced_eos_token_id": 2}),
    "M2M100": (BART, {"forced_bos_token_id": 9, "suppress_tokens": [30, 31, 99]}),
    "Pegasus": (
        {**BART, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
        {"forced_eos_token_id": 1},
    ),
    "Marian": (
        {**BART, "pad_token_id": 259, "eos_token_id": 0, "decoder_start_token_id": 259},
        {"bad_words_ids": [[259], [0]], "forced_eos_token_id": 0},
    ),
    "T5": (T5, {"begin_suppress_tokens": [*range(0, 200, 2)], "bad_words_ids": [[5, 6]]}),
    "MT5": (T5, {}),
    "UMT5": (T5, {}),
}
NAMES = {"Marian": "MarianMTModel"}
PROMPTS = [np.random.default_rng(n).integers(10, 250, n).tolist() for n in (5, 40, 17)]


def checkpoint(family: str, folder: Path) -> Any:
    """Write a tiny checkpoint, and return the torch model."""
    import transformers

    torch = require_torch()
    fields, settings = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**fields)
    name = NAMES.get(family, f"{family}ForConditionalGeneration")
    model = getattr(transformers, name)(config).eval()
    for name, value in model.named_parameters():
        if value.ndim > 1 and "position" not in name:
            value.data.normal_(0.0, 0.5)
    if getattr(model, "final_logits_bias", None) is not None:
        model.final_logits_bias.normal_(0.0, 1.0)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    return model


def engine_of(folder: Path, tokenizer: Any = None, **options: Any) -> eSurge:
    from ed_models.checkpoints import hub

    model = hub.from_pretrained(
        folder,
        task=TaskType.SEQUENCE_TO_SEQUENCE,
        dtype="float32",
        param_dtype="float32",
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    sizes = {"max_model_len": POSITIONS, "max_num_seqs": 4, "page_size": 8}
    quiet = {"compile_runner": False, "silent_mode": True, "max_num_batched_tokens": 64}
    return eSurge(model, tokenizer, **sizes, **quiet, **options)


def theirs(model: Any, prompt: list[int], new: int, **options: Any) -> list[int]:
    """Return the completion of transformers, from the first free token to the end."""
    import torch

    bos = options.get("forced_bos_token_id", model.generation_config.forced_bos_token_id)
    prefix = 1 if bos is None else 2
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=new + prefix - 1,
            **options,
        )
    found = output[0].tolist()[prefix:]
    end = model.generation_config.eos_token_id
    return found[: found.index(end) + 1] if end in found else found


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family, tmp_path):
    model = checkpoint(family, tmp_path)
    engine = engine_of(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NEW)
    outputs = [output.outputs[0] for output in engine.generate(PROMPTS, params)]
    expected = [theirs(model, prompt, NEW) for prompt in PROMPTS]
    assert [list(output.token_ids) for output in outputs] == expected
    assert len({tuple(row) for row in expected}) > 1, "the answers depend on the prompts"
    for output, row in zip(outputs, expected, strict=True):
        assert output.finish_reason == ("length" if len(row) == NEW else "stop")


@pytest.mark.nightly
@pytest.mark.torch
def test_request_chooses_the_target_language_over_http(tmp_path):
    model = checkpoint("M2M100", tmp_path)
    tokenizer = byte_tokenizer()
    prompt = tokenizer("hello")["input_ids"]
    with background(engine_of(tmp_path, tokenizer, model_name="m2m")) as url:
        for language in (9, 11, 12):
            body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0}
            body |= {"forced_bos_token_id": language, "return_token_ids": True}
            answer = httpx.post(f"{url}/completions", json=body, timeout=60).json()
            expected = theirs(model, prompt, NEW, forced_bos_token_id=language)
            end = tokenizer.eos_token_id  # also ends completions of the engine
            cut = expected.index(end) + 1 if end in expected else NEW
            assert answer["choices"][0]["token_ids"] == expected[:cut]
            messages = [{"role": "user", "content": "hello"}]
            body = {"messages": messages, "forced_bos_token_id": language, "temperature": 0}
            chat = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
            assert chat.status_code == 200, chat.text
        body = {"prompt": prompt, "forced_bos_token_id": VOCAB}
        refused = httpx.post(f"{url}/completions", json=body).json()["error"]
        assert "outside the vocabulary of 260" in refused["message"]


@pytest.mark.nightly
@pytest.mark.torch
def test_prompt_and_completion_have_separate_positions(tmp_path):
    model = checkpoint("Bart", tmp_path)
    engine = engine_of(tmp_path)
    prompt = np.random.default_rng(0).integers(10, 250, POSITIONS).tolist()
    params = SamplingParams(temperature=0, max_tokens=None)
    (output,) = engine.generate([prompt], params)
    assert list(output.outputs[0].token_ids) == theirs(model, prompt, POSITIONS - 2)
    with pytest.raises(ConfigError, match="the prompt has 65 tokens"):
        engine.generate([[*prompt, 5]], params)


def test_forced_end_at_the_limit_is_no_natural_end():
    rules = TokenRules(begin_suppress_tokens=(4,), forced_eos_token_id=2)
    params = SamplingParams()
    request = Request("r", [0], params, frozenset({2}), max_tokens=3, rules=rules)
    assert request.tracked
    assert request.take([5, 6, 2]) == 3
    assert request.finish_reason == "length"
    early = Request("r", [0], params, frozenset({2}), max_tokens=3, rules=rules)
    early.take([5, 2])
    assert early.finish_reason == "stop"
    assert (rules.get_banned_tokens(0), rules.get_banned_tokens(1)) == ((4,), ())


def test_decoder_only_model_refuses_a_forced_token(surge):
    with pytest.raises(ConfigError, match="forced_bos_token_id=3 requires an encoder-decoder"):
        surge.generate([[5]], SamplingParams(forced_bos_token_id=3))
