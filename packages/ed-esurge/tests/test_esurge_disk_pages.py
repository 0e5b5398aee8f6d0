"""Pages of the prefix cache survive a restart in a directory."""

from __future__ import annotations

import hashlib

import pytest
from ed_esurge import EngineConfig, SamplingParams, eSurge
from ed_esurge.engine import disk_pages
from ed_infra.errors import ConfigError
from pydantic import ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "num_pages": 40,
    "max_model_len": 64,
    "silent_mode": True,
    "compile_runner": False,
    "kv_offloading_size": 2.0**-10,
}


def lines_of(output):
    one = output.outputs[0]
    return one.token_ids, [{k: v.logprob for k, v in line.items()} for line in one.logprobs]


@pytest.mark.proves("prefix_cache_directory", "prefix_cache_directory_size")
@pytest.mark.nightly
def test_prefix_pages_survive_a_restart_and_damaged_files_are_misses(llama, make_llama, tmp_path):
    options = {**OPTIONS, "prefix_cache_directory": str(tmp_path / "pages")}
    prompts = [[*range(10 * n + 3, 10 * n + 43)] for n in range(2)]

    def run(model, **more):
        with eSurge(model, **{**options, **more}) as engine:
            outputs = [engine.generate(prompt, GREEDY)[0] for prompt in prompts]
            cached = [output.metrics.num_cached_tokens for output in outputs]
        return [lines_of(output) for output in outputs], cached

    expected, cached = run(llama)
    assert cached == [0, 0]
    files = sorted((tmp_path / "pages").glob("*/*/*.page"))
    assert len(files) >= 2 * 10
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    again, cached = run(llama)
    assert cached == [36, 36]  # all full pages before the last token
    for (tokens, scores), (others, before) in zip(again, expected, strict=True):
        assert tokens == others
        for one, other in zip(scores, before, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    # Other weights never read these pages.
    assert run(make_llama(seed=7))[1] == [0, 0]
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    damaged, cached = run(llama)
    assert cached == [0, 0]
    assert [tokens for tokens, _ in damaged] == [tokens for tokens, _ in expected]
    assert run(llama)[1] == [36, 36]  # the pages were written again
    size = files[0].stat().st_size
    run(llama, prefix_cache_directory_size=5 * size / 2**30)
    left = sorted((tmp_path / "pages").glob("*/*/*.page"))
    assert len(left) == 5


@pytest.mark.nightly
def test_unchanged_weights_are_hashed_once(llama, tmp_path, monkeypatch):
    hashed = []
    blake2b = hashlib.blake2b

    def counted(data, **options):
        if not options:
            hashed.append(len(data))
        return blake2b(data, **options)

    monkeypatch.setattr(disk_pages.hashlib, "blake2b", counted)
    with eSurge(llama, **OPTIONS, prefix_cache_directory=str(tmp_path / "pages")) as engine:
        leaves = len(engine.loop.runner.weights.leaves)
        engine.generate([*range(3, 43)], GREEDY)
        assert len(hashed) == leaves
    assert len(hashed) == leaves
    assert [*(tmp_path / "pages").glob("*/*/*.page")]


def test_invalid_directories_of_pages_are_refused(llama, tmp_path):
    folder = str(tmp_path / "pages")
    with pytest.raises(ValidationError, match="set kv_offloading_size as well"):
        EngineConfig(prefix_cache_directory=folder)
    with pytest.raises(ValidationError, match="cannot identify the adapters"):
        EngineConfig(prefix_cache_directory=folder, kv_offloading_size=1, max_loras=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        eSurge(llama, **OPTIONS, prefix_cache_directory=str(tmp_path / "file"))
