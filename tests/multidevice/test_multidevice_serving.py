"""An engine over the devices of two processes returns the tokens of a single process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.testing import byte_tokenizer
from ed_infra.errors import ConfigError
from ed_infra.testing import run_processes, started_processes, tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

from tests.multidevice.serving_processes import break_requests, engine, served

pytestmark = [pytest.mark.xdist_group("several_processes"), pytest.mark.nightly]


@pytest.mark.parametrize(
    ("dims", "more"),
    [
        pytest.param((1, 2, 1, 2, 1), [], id="one_over_both"),
        pytest.param((2, 1, 1, 2, 1), [], id="a_replica_in_each"),
        pytest.param((2, 1, 1, 2, 1), ["overlap"], id="a_replica_in_each_overlapped"),
        pytest.param((4, 1, 1, 1, 1), [], id="two_replicas_in_each"),
        pytest.param((1, 2, 1, 2, 1), ["draft"], id="one_over_both_with_draft_model"),
        pytest.param((1, 1, 1, 4, 1), ["offload"], id="one_over_both_with_offloading"),
        pytest.param((1, 2, 1, 2, 1), ["draft_offload"], id="one_over_both_with_both"),
        pytest.param((2, 1, 1, 2, 1), ["draft"], id="a_replica_in_each_with_draft_model"),
        pytest.param((2, 1, 1, 2, 1), ["offload"], id="a_replica_in_each_with_offloading"),
        pytest.param((2, 1, 1, 2, 1), ["draft_offload"], id="a_replica_in_each_with_both"),
    ],
)
def test_two_processes_execute_same_engine_steps(
    tmp_path: Path, dims: tuple[int, ...], more: list[str]
) -> None:
    arguments = [str(tmp_path), *map(str, dims), *more]
    command = ["-m", "tests.multidevice.serving_processes", *arguments]
    run_processes(command, tmp_path, processes=2, devices=2)
    alone = engine((1, 1, 1, 1, 1))
    break_requests(alone)
    expected = served(alone)
    assert len(expected[0]) == 4  # failed requests
    assert json.loads((tmp_path / "tokens.json").read_text()) == expected
    assert alone.stats()["num_preemptions"] > 0
    stats = json.loads((tmp_path / "stats.json").read_text())
    case = "".join(more)
    assert ("draft" in case) == (stats.get("spec_decode_num_accepted_tokens", 0) > 0)
    assert ("offload" in case) == (stats.get("external_prefix_cache_hits", 0) > 0)
    with pytest.raises(ConfigError, match="no leader to follow"):
        alone.follow()
    # Both processes have the number of pages that the process with the least memory allows.
    first, second = (json.loads((tmp_path / f"sizes_{i}.json").read_text()) for i in range(2))
    assert first == second
    assert first["fewer"] == 12
    assert "hbm_utilization 0.85 of 1.0 GiB leaves 0.00 GiB" in first["none"]


@pytest.mark.parametrize("dims", [(1, 1, 1, 4, 1), (2, 1, 1, 2, 1)], ids=["shared", "replicas"])
def test_each_process_stores_its_parts_of_prefix_pages(tmp_path: Path, dims) -> None:
    command = ["-m", "tests.multidevice.serving_processes", str(tmp_path), *map(str, dims)]

    def run() -> list:
        run_processes([*command, "stored"], tmp_path, processes=2, devices=2)
        return json.loads((tmp_path / "tokens.json").read_text())

    (cached, *expected), pages = run(), tmp_path / "pages"
    assert cached == [0, 0]
    cached, *tokens = run()
    assert cached == [32, 32]  # full pages of 8 before the last token
    assert tokens == expected
    # A page without the part of one process is computed again. Each replica has own pages.
    folders = sorted(pages.iterdir())
    assert len(folders) == 2
    for file in folders[0].glob("*/*.page"):
        file.write_bytes(file.read_bytes()[:-1])
    cached, *tokens = run()
    assert sorted(cached) == ([0, 0] if dims[0] == 1 else [0, 32])
    assert tokens == expected
    assert run()[0] == [32, 32]


@pytest.mark.parametrize("dims", ["1,1,1,-1,1", "-1,1,1,1,1"])
def test_first_process_serves_and_others_exit_with_it(tmp_path: Path, dims: str) -> None:
    fields = tiny_llama(vocab_size=260, num_hidden_layers=2)
    fields.pop("model_type")
    LlamaForCausalLM.create(LlamaConfig(**fields), seed=1).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    flags = {
        "--port": "0",
        "--sharding-axis-dims": dims,
        "--max-model-len": "64",
        "--max-num-seqs": "2",
        "--max-num-seq-buckets": "[2]",
        "--max-num-batched-tokens": "16",
        "--page-size": "16",
    }
    command = ["-m", "ed_esurge", "serve", str(tmp_path / "model"), "--no-compile-runner"]
    command += ["=".join(flag) for flag in flags.items()]
    with started_processes(command, tmp_path, processes=2, devices=1) as both:
        url = None
        deadline = time.monotonic() + 300
        while url is None:
            logs = [(tmp_path / f"process_{i}.log").read_text() for i in range(2)]
            assert time.monotonic() < deadline and not any(p.poll() for p in both), logs
            url = re.search(r"serving at (\S+)", logs[0])
            time.sleep(0.1)
        for prompt in ("The cat", "A dog"):
            body = {"model": "model", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
            reply = httpx.post(f"{url[1]}/completions", json=body, timeout=300)
            assert reply.json()["usage"]["completion_tokens"] == 3, reply.text
        both[1].send_signal(signal.SIGTERM)  # a signal reaches the processes in any order
        time.sleep(1)
        assert both[1].poll() is None
        assert httpx.post(f"{url[1]}/completions", json=body, timeout=300).status_code == 200
        both[0].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in both] == [0, 0]


def test_two_models_over_two_processes_answer_like_engines_of_one_process(tmp_path: Path) -> None:
    fields = tiny_llama(vocab_size=260, num_hidden_layers=2, initializer_range=0.2)
    fields.pop("model_type")
    expected: dict[tuple[str, str], str] = {}
    prompts = ("The cat", "A dog", "Some longer words of a prompt", "?")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for seed, name in enumerate(("first", "second")):
        model = LlamaForCausalLM.create(LlamaConfig(**fields), seed=seed)
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        alone = eSurge(model, byte_tokenizer(), max_model_len=64, max_num_seqs=2, page_size=16)
        for prompt, output in zip(prompts, alone.generate(list(prompts), params), strict=True):
            expected[name, prompt] = output.outputs[0].text
    command = [sys.executable, "-m", "ed_esurge", "serve", str(tmp_path / "first")]
    command += ["--also", str(tmp_path / "second")]
    command += shlex.split(
        "--port 0 --nnodes 2 --sharding-axis-dims 1,1,1,2,1 --max-model-len 64 --max-num-seqs 2 "
        "--max-num-seq-buckets [2] --max-num-batched-tokens 16 --page-size 16 --no-compile-runner"
    )
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    log = tmp_path / "log"
    with log.open("wb") as out:
        first = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        url = None
        while url is None:
            assert first.poll() is None, log.read_text()
            url = re.search(r"serving at (\S+)", log.read_text())
            time.sleep(0.1)

        def answer(request: tuple[str, str]) -> str:
            body = {"model": request[0], "prompt": request[1], "max_tokens": 12}
            body |= {"temperature": 0, "ignore_eos": True}
            reply = httpx.post(f"{url[1]}/completions", json=body, timeout=300)
            return reply.json()["choices"][0]["text"]

        requests = [*expected] * 3
        with ThreadPoolExecutor(8) as clients:  # the steps of both engines alternate
            for request, text in zip(requests, clients.map(answer, requests), strict=True):
                assert text == expected[request]
        first.terminate()
        assert first.wait(60) == 0, log.read_text()
    finally:
        first.kill()
        first.wait()


def test_first_process_starts_the_others_and_ends_if_one_of_them_is_lost(tmp_path: Path) -> None:
    fields = tiny_llama(vocab_size=260, num_hidden_layers=2)
    fields.pop("model_type")
    LlamaForCausalLM.create(LlamaConfig(**fields), seed=1).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "ed_esurge", "serve", str(tmp_path / "model")]
    command += shlex.split(
        "--port 0 --nnodes 2 --sharding-axis-dims 1,1,1,2,1 --max-model-len 64 --max-num-seqs 2 "
        "--max-num-seq-buckets [2] --max-num-batched-tokens 16 --page-size 16 --no-compile-runner"
    )
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    for ends in ("signal", "loss"):
        log = tmp_path / f"{ends}.log"
        with log.open("wb") as out:
            first = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            url = None
            while url is None:
                assert first.poll() is None, log.read_text()
                url = re.search(r"serving at (\S+)", log.read_text())
                time.sleep(0.1)
            body = {"model": "model", "prompt": "A dog", "max_tokens": 3, "ignore_eos": True}
            reply = httpx.post(f"{url[1]}/completions", json=body, timeout=300)
            assert reply.json()["usage"]["completion_tokens"] == 3, reply.text
            if ends == "signal":
                first.terminate()
                assert first.wait(60) == 0, log.read_text()
                continue
            children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
            words = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
            others = [child for child, line in words.items() if "--node-rank" in line]
            assert len(others) == 1
            os.kill(int(others[0]), signal.SIGKILL)
            assert first.wait(30) == 1, log.read_text()
            assert "a process of the model ended (-9)" in log.read_text()
        finally:
            first.kill()
            first.wait()
