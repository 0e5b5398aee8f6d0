"""`AsyncEngine`: concurrent coroutines, closed streams, and failures of the engine."""

from __future__ import annotations

import asyncio

import pytest
from ed_esurge import AsyncEngine, SamplingParams
from ed_infra.errors import ConfigError, EasyDeLError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def engine(surge):
    engine = AsyncEngine(surge)
    engine.start()
    yield engine
    engine.shutdown()
    assert not surge.has_unfinished_requests


async def collect(engine, prompt, params, name):
    deltas = [delta async for delta in engine.generate(prompt, params, name)]
    whole = deltas[0]
    for delta in deltas[1:]:
        whole.add(delta)
    return whole


@pytest.mark.nightly
def test_concurrent_requests_produce_same_tokens_as_alone(surge, prompts, engine):
    async def everything():
        jobs = [collect(engine, p, GREEDY, f"r{i}") for i, p in enumerate(prompts)]
        return await asyncio.gather(*jobs)

    outputs = asyncio.run(everything())
    engine.shutdown()
    alone = [surge.generate(p, GREEDY)[0].outputs[0].token_ids for p in prompts]
    assert [out.outputs[0].token_ids for out in outputs] == alone
    assert all(out.finished and out.metrics.finished_time for out in outputs)


def test_closed_stream_is_aborted_and_others_continue(surge, prompts, engine):
    async def leave():
        stream = engine.generate(prompts[0], GREEDY.replace(max_tokens=100), "left")
        await anext(stream)
        other = asyncio.create_task(collect(engine, prompts[1], GREEDY, "stays"))
        await stream.aclose()
        return await other

    assert len(asyncio.run(leave()).outputs[0].token_ids) == 12


def test_slow_reader_receives_merged_deltas(surge, prompts, engine):
    async def slow():
        deltas = []
        params = GREEDY.replace(logprobs=0, n=2)
        async for delta in engine.generate(prompts[1], params, "slow"):
            deltas.append(delta)
            if len(deltas) == 1:
                while surge.has_unfinished_requests:
                    await asyncio.sleep(0.01)
        return deltas

    deltas = asyncio.run(slow())
    assert len(deltas) <= 3
    whole = deltas[0]
    for delta in deltas[1:]:
        whole.add(delta)
    engine.shutdown()
    alone = surge.generate(prompts[1], GREEDY.replace(logprobs=0, n=2))[0]
    for mine, other in zip(whole.outputs, alone.outputs, strict=True):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert len(mine.logprobs) == 12
        assert mine.finish_reason == "length"


@pytest.mark.nightly
def test_abort_finishes_stream_with_abort_reason(prompts, engine):
    async def abort():
        stream = engine.generate(prompts[0], GREEDY.replace(max_tokens=100), "x")
        await anext(stream)
        await engine.abort("x")
        await engine.abort("unknown")
        return [delta async for delta in stream]

    assert asyncio.run(abort())[-1].outputs[0].finish_reason == "abort"


def test_generate_raises_config_error_for_invalid_requests(prompts, engine):
    async def twice():
        first = engine.generate(prompts[0], GREEDY.replace(max_tokens=100), "same")
        await anext(first)
        with pytest.raises(ConfigError, match="in use"):
            await anext(engine.generate(prompts[0], GREEDY, "same"))
        # The first request with the id continues.
        assert (await anext(first)).outputs[0].token_ids
        await first.aclose()
        with pytest.raises(ConfigError, match="no tokens"):
            await anext(engine.generate([], GREEDY, "empty"))

    asyncio.run(twice())
    assert engine.is_healthy


@pytest.mark.nightly
def test_weight_update_changes_outputs_until_restored(llama, make_llama, prompts, engine):
    async def swap():
        before = await collect(engine, prompts[2], GREEDY, "before")
        await engine.update_model_weights(make_llama(seed=2))
        between = await collect(engine, prompts[2], GREEDY, "between")
        await engine.update_model_weights(llama)
        after = await collect(engine, prompts[2], GREEDY, "after")
        with pytest.raises(ConfigError, match="structure"):
            await engine.update_model_weights(make_llama(attention_bias=True))
        return [out.outputs[0].token_ids for out in (before, between, after)]

    before, between, after = asyncio.run(swap())
    assert before == after != between


def test_paused_engine_keeps_its_requests(surge, prompts, engine):
    async def wait():
        started = asyncio.Event()

        async def follow():
            tokens = 0
            async for delta in engine.generate(prompts[1], GREEDY.replace(max_tokens=110), "p"):
                started.set()
                tokens += len(delta.outputs[0].token_ids)
            return tokens

        job = asyncio.create_task(follow())
        await started.wait()
        surge.pause()
        await asyncio.sleep(0.3)
        paused = not job.done() and engine.is_healthy
        surge.resume()
        return paused, await job

    assert asyncio.run(wait()) == (True, 110)


def test_unstarted_or_failed_engine_raises_error(surge, prompts, monkeypatch):
    engine = AsyncEngine(surge)
    assert not engine.is_healthy
    with pytest.raises(EasyDeLError, match="start"):
        asyncio.run(collect(engine, prompts[0], GREEDY, "a"))
    engine.start()
    assert engine.is_healthy

    def fail():
        surge.abort_request("b")
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(surge, "step", fail)
        with pytest.raises(EasyDeLError, match="no room"):
            asyncio.run(collect(engine, prompts[0], GREEDY, "b"))
    assert not engine.is_healthy
    with pytest.raises(EasyDeLError, match="failed"):
        engine.start()
    surge.step()  # discards the outputs of the aborted requests


def test_second_driver_of_an_engine_raises_error(surge, prompts, engine):
    second = AsyncEngine(surge)
    with pytest.raises(EasyDeLError, match="another AsyncEngine drives this engine"):
        second.start()
    engine.shutdown()
    second.start()
    try:
        with pytest.raises(EasyDeLError, match="another AsyncEngine"):
            engine.start()
        assert asyncio.run(collect(second, prompts[0], GREEDY, "a")).finished
    finally:
        second.shutdown()


def test_request_during_shutdown_raises_error(prompts, engine, monkeypatch):
    """The engine stops after the request has checked that the engine runs."""
    check = engine._check_alive

    def late():
        check()
        engine.shutdown()

    monkeypatch.setattr(engine, "_check_alive", late)

    async def ask():
        with pytest.raises(EasyDeLError, match="shut down"):
            await asyncio.wait_for(collect(engine, prompts[0], GREEDY, "a"), 20)

    asyncio.run(ask())
