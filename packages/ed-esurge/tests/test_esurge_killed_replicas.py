"""Servers with replicas in processes: killed replicas, new weights, other hosts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.engine.channel import SECRET
from ed_esurge.testing import byte_tokenizer
from replica_processes import ReplicaServer, serving

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("several_processes")]
PROMPTS = ["a", "the cat", "x" * 40, "once upon a time there was", "b" * 20, "the dog"]
TOKENS = 48
CLIENTS = 32
DP = ("--data-parallel-size", "2")


@pytest.fixture(scope="module")
def directory(make_llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `one` and `two` with different weights."""
    path = tmp_path_factory.mktemp("served")
    for seed, name in ((1, "one"), (2, "two")):
        make_llama(seed=seed, max_position_embeddings=128).save_pretrained(path / name)
        byte_tokenizer().save_pretrained(path / name)
    return path


def texts(directory: Path, name: str) -> dict[str, str]:
    """Return the greedy answers of a model in one process."""
    import jax.numpy as jnp
    from ed_models import AutoEasyDeLModelForCausalLM

    model = AutoEasyDeLModelForCausalLM.from_pretrained(
        directory / name, dtype=jnp.float32, param_dtype=jnp.float32
    )
    engine = eSurge(
        model, byte_tokenizer(), max_model_len=128, max_num_seqs=8, page_size=16,
        compile_runner=False, silent_mode=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = engine.generate(PROMPTS, params)
    return {p: out.outputs[0].text for p, out in zip(PROMPTS, outputs, strict=True)}


async def answer(http: httpx.AsyncClient, prompt: str, **more: object) -> str:
    """Return the text of a stream, or `error: ` and the message of its error event."""
    body = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }
    text, done = "", False
    async with http.stream("POST", "completions", json=body) as response:
        if response.status_code != 200:
            return f"error: {json.loads(await response.aread())['error']['message']}"
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error: {event['error']['message']}"
                text += event["choices"][0]["text"]
    assert done, "the stream ended without an error and without its last event"
    return text


async def load(server: ReplicaServer, seconds: float, work) -> list[tuple[str, str]]:
    """Return the prompts and answers of streaming clients during `work` and until they end."""
    answers: list[tuple[str, str]] = []
    draw = random.Random(0)
    working = True

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

        async def client() -> None:
            while working:
                prompt = draw.choice(PROMPTS)
                answers.append((prompt, await asyncio.wait_for(answer(http, prompt), 120)))

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        await asyncio.sleep(seconds)
        await work(http, answers)
        await asyncio.sleep(seconds)
        working = False
        await asyncio.gather(*clients)
    return answers


def test_killed_replica_under_load_leaves_no_request_without_an_answer(
    directory: Path, record_property
) -> None:
    expected = texts(directory, "one")
    kills = int(os.environ.get("ESURGE_REPLICA_KILLS", "3"))
    recovery: list[float] = []
    with serving(directory / "one", *DP) as server:

        async def kill(http: httpx.AsyncClient, answers: list[tuple[str, str]]) -> None:
            draw = random.Random(1)
            for _ in range(kills):
                count = len(answers)
                while len(answers) < count + 2 * CLIENTS:  # both replicas have compiled and answer
                    await asyncio.sleep(0.1)
                before = server.replicas
                assert len(before) == 2
                os.kill(draw.choice(before), signal.SIGKILL)
                began = time.monotonic()
                for ready in (1, 2):  # the server has noticed the loss, and has a new replica
                    while await asyncio.to_thread(lambda: server.num_ready) != ready:
                        await asyncio.sleep(0.1)
                recovery.append(time.monotonic() - began)

        answers = asyncio.run(load(server, 1, kill))
        limit = time.monotonic() + 30  # replicas report their state every half second
        while any(server.metric("vllm:num_requests_running").values()):
            assert time.monotonic() < limit, "a replica still runs a request"
            time.sleep(0.1)
    kinds = Counter("error" if text.startswith("error: ") else "text" for _, text in answers)
    for prompt, text in answers:
        if text.startswith("error: "):
            assert "was lost in the middle of the answer" in text
        else:
            assert text == expected[prompt]
    assert kinds["error"] <= kills * 8  # the requests of a batch of the lost replica
    summary = (
        f"{kills} kills, {kinds['text']} equal answers, {kinds['error']} error events, restart "
        f"after at most {max(recovery):.1f} s"
    )
    print(summary)
    record_property("summary", summary)


def test_new_weights_reach_replicas_one_by_one_without_an_error(directory: Path) -> None:
    old, new = texts(directory, "one"), texts(directory, "two")
    with serving(directory / "one", *DP, "--weights-directory", str(directory)) as server:
        root = server.url.replace("/v1", "")

        async def update(http: httpx.AsyncClient, answers: list[tuple[str, str]]) -> None:
            body = {"model_path": "two"}
            done = await http.post(f"{root}/update_weights_from_disk", json=body)
            assert done.json()["success"], done.text
            count = len(answers)
            while len(answers) < count + 2 * CLIENTS:
                await asyncio.sleep(0.05)
            # Each request is answered by one version: those sent after the update by the new one.
            late.extend(answers[count + CLIENTS :])

        late: list[tuple[str, str]] = []
        answers = asyncio.run(load(server, 1, update))
        assert all(text in (old[prompt], new[prompt]) for prompt, text in answers)
        assert late and all(text == new[prompt] for prompt, text in late)
        # A replica that starts again has the new weights.
        os.kill(server.replicas[0], signal.SIGKILL)
        for ready in (1, 2):
            while server.num_ready != ready:
                time.sleep(0.02)

        async def again() -> list[str]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
                return await asyncio.gather(*(answer(http, p) for p in PROMPTS * 2))

        assert asyncio.run(again()) == [new[prompt] for prompt in PROMPTS * 2]
        wrong = httpx.post(f"{root}/update_weights_from_disk", json={"model_path": "../x"})
        assert wrong.status_code == 403
        wrong = httpx.post(f"{root}/update_weights_from_disk", json={"model_path": "three"})
        assert wrong.status_code == 404


def test_two_models_with_draft_offload_and_stored_pages_are_replicated(
    directory: Path, tmp_path: Path
) -> None:
    one, two = texts(directory, "one"), texts(directory, "two")
    draft = {"method": "draft_model", "model": str(directory / "two"), "num_speculative_tokens": 2}
    offload = ["--kv-offloading-size", "0.01", "--num-pages", "10"]
    for options in (
        ["--speculative-config", json.dumps(draft), *offload],
        [*offload, "--prefix-cache-directory", str(tmp_path / "pages")],
    ):
        flags = [*DP, "--also", str(directory / "two"), *options]
        with serving(directory / "one", *flags) as server:

            async def ask(url: str = server.url) -> list[list[str]]:
                async with httpx.AsyncClient(base_url=url, timeout=300) as http:
                    asks = (
                        asyncio.gather(*(answer(http, p, model=name) for p in PROMPTS * 2))
                        for name in ("one", "two")
                    )
                    return await asyncio.gather(*asks)

            assert asyncio.run(ask()) == [[each[p] for p in PROMPTS * 2] for each in (one, two)]
            assert len(server.replicas) == 4
    assert list((tmp_path / "pages").glob("*/*/*")), "the pages were stored at the end"


def test_replica_of_another_host_joins_with_the_printed_command(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "a shared secret")
    with socket_port() as port:
        pass
    words = [sys.executable, "-m", "ed_esurge", "join", f"127.0.0.1:{port}"]
    flags = [*DP, "--data-parallel-size-local", "1", "--data-parallel-rpc-port", str(port)]
    joined: list[subprocess.Popen[bytes]] = []
    starter = subprocess.Popen(
        ["bash", "-c", f"until {' '.join(words)} 2> /dev/null; do sleep 0.2; done"]
    )
    joined.append(starter)
    try:
        with serving(directory / "one", *flags) as server:
            assert f"esurge join 127.0.0.1:{port}" in "".join(server.log)
            assert len(server.replicas) == 1
            assert server.num_ready == 2
        assert starter.wait(60) == 0
    finally:
        starter.kill()
        starter.wait()


def socket_port():
    """Return a context whose value is a free port."""
    import socket
    from contextlib import contextmanager

    @contextmanager
    def found():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            yield listener.getsockname()[1]

    return found()


def test_replica_that_cannot_start_ends_the_server_with_its_error(directory: Path) -> None:
    command = [sys.executable, "-m", "ed_esurge", "serve", str(directory / "one"), *DP]
    flags = ["--port", "0", "--speculative-config", '{"method": "draft_model", "model": "nowhere"}']
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "cannot start" in done.stderr and "nowhere" in done.stderr
