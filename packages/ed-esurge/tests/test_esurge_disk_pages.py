"""Pages of the prefix cache survive a restart in a directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

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


SERVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from conftest import build_llama
from ed_esurge import AsyncEngine, eSurge
from test_esurge_disk_pages import GREEDY, OPTIONS

async def serve():
    engine = AsyncEngine(eSurge(build_llama(), **OPTIONS, prefix_cache_directory=sys.argv[1],
                                prefix_cache_interval=0.05))
    engine.start()
    async for output in engine.generate([*range(3, 43)], GREEDY, "a"):
        pass
    print("answered", flush=True)
    await asyncio.sleep(600)

asyncio.run(serve())
"""


@pytest.mark.proves("prefix_cache_interval")
@pytest.mark.nightly
def test_pages_of_a_killed_server_are_read_by_the_next(llama, tmp_path):
    folder = tmp_path / "pages"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVER, str(folder), str(Path(__file__).parent)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "answered\n"
        deadline = time.monotonic() + 60
        while len([*folder.glob("*/*/*.page")]) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        server.kill()
    assert len([*folder.glob("*/*/*.page")]) == 10
    with eSurge(llama, **OPTIONS, prefix_cache_directory=str(folder)) as engine:
        (output,) = engine.generate([*range(3, 43)], GREEDY)
    assert output.metrics.num_cached_tokens == 36


def test_new_pages_are_written_in_parts_and_once(llama, make_llama, tmp_path):
    folder = tmp_path / "pages"
    engine = eSurge(llama, **OPTIONS, prefix_cache_directory=str(folder))
    engine.generate([*range(3, 43)], GREEDY)
    (group,) = engine.loop.scheduler.pages.pools
    page = engine.loop.runner.host.page_bytes(group)
    assert [engine.store_pages(4 * page) for _ in range(4)] == [4, 4, 2, 0]
    engine.generate([*range(3, 43), *range(50, 58)], GREEDY)
    assert engine.store_pages(100 * page) == 2
    engine.update_model_weights(make_llama(seed=7))
    engine.generate([*range(3, 43)], GREEDY)
    assert engine.store_pages(100 * page) == 10  # equal keys of other weights
    assert len([*folder.iterdir()]) == 2


def test_full_disk_does_not_end_a_running_engine(llama, tmp_path, monkeypatch, caplog):
    def refuse(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_pages, "write_private", refuse)
    engine = eSurge(llama, **OPTIONS, prefix_cache_directory=str(tmp_path / "pages"))
    engine.generate([*range(3, 43)], GREEDY)
    with caplog.at_level("WARNING"):
        assert [engine.store_pages(2**20) for _ in range(2)] == [0, 0]
    assert caplog.text.count("No space left") == 1
