"""Beam search over HTTP equals its definition on the logits of the model."""

from __future__ import annotations

import math

import httpx
import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer
from ed_infra.testing import require_torch

WIDTH, STEPS = 3, 5
PROMPT = [5, 17, 80, 33, 90, 12, 44, 61]


@pytest.fixture(scope="module")
def served(llama):
    engine = eSurge(
        llama,
        byte_tokenizer(),
        max_model_len=64,
        page_size=4,
        num_pages=64,
        max_num_seqs=4,
        compile_runner=False,
        silent_mode=True,
    )
    with background(engine) as url:
        yield engine, url


def search(logits, eos, *, penalty, ignore_eos, width=WIDTH, most=STEPS):
    """vLLM's beam search, written with plain lists."""

    def score(tokens, total):
        length = len(PROMPT) + len(tokens) - (bool(tokens) and tokens[-1] in eos and not ignore_eos)
        return total / length**penalty

    beams, complete = [([], 0.0)], []
    for _ in range(most):
        new = []
        for tokens, total in beams:
            line = logits([*PROMPT, *tokens])[-1]
            line = line - line.max()
            line = line - math.log(np.exp(line).sum())
            for token in np.argsort(-line)[: 2 * width]:
                entry = ([*tokens, int(token)], total + float(line[token]))
                ended = int(token) in eos and not ignore_eos
                (complete if ended else new).append(entry)
        beams = sorted(new, key=lambda one: -score(*one))[:width]
    return sorted([*complete, *beams], key=lambda one: -score(*one))[:width]


@pytest.mark.daily("0.0-False")
@pytest.mark.parametrize(("penalty", "ignore_eos"), [(1.0, True), (0.0, False), (2.0, False)])
def test_beam_search_returns_the_beams_of_its_definition(served, plain_logits, penalty, ignore_eos):
    engine, url = served
    expected = search(
        plain_logits, set(engine.eos_token_ids), penalty=penalty, ignore_eos=ignore_eos
    )
    body = {
        "prompt": PROMPT,
        "use_beam_search": True,
        "n": WIDTH,
        "max_tokens": STEPS,
        "length_penalty": penalty,
        "ignore_eos": ignore_eos,
        "logprobs": 1,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/completions", json=body, timeout=120).json()
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _ in expected]
    for choice, (_, total) in zip(choices, expected, strict=True):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(total, abs=1e-3)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.nightly
@pytest.mark.torch
def test_beams_equal_those_of_transformers(served, llama, tmp_path):
    """Without a penalty of the length and an end, both definitions sum the log-probabilities."""
    torch = require_torch()
    from transformers import AutoModelForCausalLM

    llama.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine, _ = served
    prompts = [PROMPT, PROMPT[::-1], [7, 7, 7, 9]]
    params = SamplingParams(
        use_beam_search=True, n=4, max_tokens=8, ignore_eos=True, length_penalty=0.0, logprobs=0
    )
    for prompt, found in zip(prompts, engine.generate(prompts, params), strict=True):
        with torch.no_grad():
            theirs = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=4,
                num_return_sequences=4,
                length_penalty=0.0,
                max_new_tokens=8,
                min_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        tokens = theirs.sequences[:, len(prompt) :].tolist()
        assert [out.token_ids for out in found.outputs] == tokens
        scores = [out.cumulative_logprob for out in found.outputs]
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-3)


@pytest.mark.nightly
def test_step_computes_one_token_for_each_beam(served):
    engine, _ = served
    params = SamplingParams(
        use_beam_search=True, n=WIDTH, max_tokens=10, ignore_eos=True, temperature=0
    )
    before = engine.stats()["iteration_tokens_sum"]
    outputs = engine.generate([PROMPT[::-1]], params)[0].outputs
    assert [len(out.token_ids) for out in outputs] == [10] * WIDTH
    tokens = engine.stats()["iteration_tokens_sum"] - before
    assert tokens == len(PROMPT) + 9 * WIDTH


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3},
        {"num_pages": 9, "max_model_len": 24},
        {"enable_prefix_caching": False},
        {"kv_offloading_size": 0.01},
        {"max_num_batched_tokens": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_beams_are_equal_when_slots_pages_or_shared_pages_are_missing(llama, plain_logits, options):
    """Beams then wait for each other, lose their pages, or compute their tokens again."""
    width, steps = 5, 12
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 64, "max_num_seqs": 4, **options}
    engine = eSurge(llama, byte_tokenizer(), compile_runner=False, silent_mode=True, **sizes)
    expected = search(plain_logits, set(), penalty=1.0, ignore_eos=True, width=width, most=steps)
    params = SamplingParams(
        use_beam_search=True, n=width, max_tokens=steps, ignore_eos=True, logprobs=0
    )
    other = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = engine.generate([PROMPT], other)[0].outputs[0].token_ids
    found, beside = engine.generate([PROMPT, PROMPT], [params, other])
    assert [out.token_ids for out in found.outputs] == [tokens for tokens, _ in expected]
    for out, (_, total) in zip(found.outputs, expected, strict=True):
        assert out.cumulative_logprob == pytest.approx(total, abs=1e-3)
    assert beside.outputs[0].token_ids == alone
    assert not engine.unfinished_requests()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"n": 11}, "n"),
        ({"top_k": 5}, "top_k"),
        ({"stop": ["a"]}, "stop"),
        ({"guided_regex": "a+"}, "structured_outputs"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"best_of": 4, "n": 2}, "best_of"),
    ],
)
def test_options_without_effect_on_beams_are_refused(served, more, param):
    _, url = served
    body = {"prompt": PROMPT, "use_beam_search": True, "max_tokens": 2, **more}
    answer = httpx.post(f"{url}/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
