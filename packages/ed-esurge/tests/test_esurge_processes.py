"""Replicas in processes answer as one engine, and the loss of one process loses no request."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.core.prefix_cache import prompt_keys
from ed_esurge.engine.channel import ForgedMessageError
from ed_esurge.engine.connection import Connection, ConnectionLost
from ed_esurge.engine.intake import CheckedPrompt, TokenIdError
from ed_esurge.processes.connected_replica import SentPrefixes
from ed_esurge.processes.hub import device_shares
from ed_esurge.processes.messages import decode_error, encode_error
from ed_esurge.processes.replica_group import ReplicaLostError
from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError
from local_replicas import OPTIONS, LocalReplica, collect_tokens, serving_replicas


@pytest.fixture(scope="module")
def engines(llama, tokenizer) -> list[eSurge]:
    return [eSurge(llama, tokenizer, **OPTIONS) for _ in range(2)]


@pytest.fixture
def replicated(engines, tokenizer):
    """An engine with two replicas, the replicas, and the hub."""
    with serving_replicas(engines[0].config, tokenizer, 2) as (front, hub, starting):
        replicas = [LocalReplica(hub, engine) for engine in engines]
        starting.join(60)
        yield front, replicas, hub
    for replica in replicas:
        replica.end()


def test_two_replicas_answer_as_one_engine_and_a_lost_one_loses_no_unanswered_request(
    engines, replicated, prompts, llama, tokenizer
) -> None:
    front, replicas, _ = replicated
    assert replicas[0].run == {"a": 1}
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    drawn = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True)
    alone = eSurge(llama, tokenizer, **OPTIONS)
    expected = {kind: alone.generate(prompts, p) for kind, p in (("g", greedy), ("d", drawn))}

    async def run() -> None:
        for kind, params in (("g", greedy), ("d", drawn)):  # seeds continue as in one engine
            jobs = [collect_tokens(front, p, params, f"{kind}{i}") for i, p in enumerate(prompts)]
            answers = await asyncio.gather(*jobs)
            assert answers == [out.outputs[0].token_ids for out in expected[kind]]
        wrong = SamplingParams(logit_bias={10**6: 1.0}, max_tokens=2)
        with pytest.raises(TokenIdError):
            await collect_tokens(front, prompts[0], wrong, "wrong")
        # A replica is lost: the caller of one of its requests has received an output.
        long = CheckedPrompt(prompts[1], 90)
        outputs = front.generate(long, greedy.replace(max_tokens=90), "begun")
        await anext(outputs)
        late = enumerate(prompts)
        jobs = [asyncio.create_task(collect_tokens(front, p, greedy, f"late{i}")) for i, p in late]
        await asyncio.sleep(0)
        front.replicas._requests["begun"].replica.drop()
        with pytest.raises(ReplicaLostError, match="send the request again"):
            [output async for output in outputs]
        for job, answer in zip(jobs, expected["g"], strict=True):
            with suppress(ReplicaLostError):  # an output was sent
                assert await asyncio.wait_for(job, 60) == answer.outputs[0].token_ids
        assert front.replicas.num_ready == 1 and front.is_healthy and not front.replicas._requests

    asyncio.run(run())


def test_requests_with_one_prefix_go_to_one_replica(replicated, tokenizer) -> None:
    front, replicas, _ = replicated
    heads = [[20 + group] * 40 for group in range(4)]
    before = sum(each.engine.stats()["prefix_cache_hits"] for each in replicas)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    async def run() -> None:
        for turn in range(4):
            for group, head in enumerate(heads):
                await collect_tokens(front, [*head, 50 + turn], params, f"{group}-{turn}")

    asyncio.run(run())
    # Each head is computed once, and the three later prompts of its group find its 40 tokens.
    after = sum(each.engine.stats()["prefix_cache_hits"] for each in replicas)
    assert after - before == 4 * 3 * 40


def test_calls_reach_all_replicas_and_a_new_replica_repeats_them(replicated, engines) -> None:
    front, replicas, hub = replicated

    async def run() -> None:
        await front.sleep(1)
        assert front.is_sleeping and all(one.engine.is_sleeping for one in replicas)
        with pytest.raises(ConfigError, match="model in memory"):
            await front.load_weights("nowhere")
        replicas[0].end()
        while front.replicas.num_ready == 2:
            await asyncio.sleep(0.01)
        engines[0].wake_up()
        replicas[0] = LocalReplica(hub, engines[0])
        while front.replicas.num_ready == 1 or not engines[0].is_sleeping:
            await asyncio.sleep(0.01)
        await front.wake_up()
        assert not front.is_sleeping and not any(one.engine.is_sleeping for one in replicas)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_connection_without_the_secret_is_rejected(replicated) -> None:
    front, _, hub = replicated
    with pytest.raises((ForgedMessageError, ConnectionLost)):
        Connection.open(hub.address, b"another")
    with socket.create_connection(tuple(hub.address.split(":"))) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert front.replicas.num_ready == 2


def test_errors_keep_their_kind_between_processes() -> None:
    for error in (TokenIdError("prompt", 9, 4), ConfigError("a"), CheckpointError("b")):
        again = decode_error(encode_error(error))
        assert type(again) is type(error) and str(again) == str(error)
    assert type(decode_error(encode_error(ValueError("c")))) is EasyDeLError


def test_sent_prefixes_forget_the_least_recent_pages(monkeypatch) -> None:
    monkeypatch.setattr("ed_esurge.processes.connected_replica.MAX_PAGES", 4)
    sent = SentPrefixes()
    first, second = (prompt_keys([token] * 25, b"", 8) for token in (1, 2))
    sent.add(first)
    assert (sent.count_prefix_pages(first), sent.count_prefix_pages(second)) == (3, 0)
    sent.add(second)
    assert (sent.count_prefix_pages(first), sent.count_prefix_pages(second)) == (1, 3)


def test_each_replica_gets_its_share_of_the_gpus(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shares = [one["CUDA_VISIBLE_DEVICES"] for one in device_shares(2)]
    assert shares == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="4 GPUs cannot be divided among 3"):
        device_shares(3)
