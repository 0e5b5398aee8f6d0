"""Replicas over `dp` produce the outputs of one engine, and each replica has separate pages."""

from __future__ import annotations

import asyncio

import httpx
import jax
import numpy as np
import pytest
from ed_esurge import AsyncEngine, EngineConfig, PoolingParams, SamplingParams, eSurge
from ed_esurge.core.request import RequestError
from ed_esurge.core.router import ReplicaRouter
from ed_esurge.runner.result import StepResult
from ed_esurge.server import background
from ed_infra.errors import ConfigError, EasyDeLError, MeshError
from ed_infra.specs import LoraSpec
from ed_models.adapters.lora import lora_layers
from flax import nnx

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {
    "max_num_seqs": 4,
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "max_num_seq_buckets": (4,),
    "min_input_pad": 16,
    "max_model_len": 64,
    "max_loras": 1,
    "max_lora_rank": 4,
    "silent_mode": True,
}
PARAMS = [
    GREEDY.replace(logprobs=1),
    SamplingParams(temperature=1, seed=5, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1, max_tokens=7, ignore_eos=True),  # the engine selects the seed
    GREEDY.replace(presence_penalty=1.0, logit_bias={9: 2.0}),
    SamplingParams(n=2, temperature=1, seed=8, max_tokens=6, ignore_eos=True),
    GREEDY.replace(prompt_logprobs=0),
    GREEDY.replace(max_tokens=20),
    SamplingParams(temperature=0.7, top_k=20, max_tokens=8, ignore_eos=True),
]


def tokens_of(outputs):
    return [[one.token_ids for one in out.outputs] for out in outputs]


@pytest.fixture(scope="module")
def one(llama, tokenizer):
    """An engine without replicas."""
    return eSurge(llama, tokenizer, **OPTIONS, compile_runner=False)


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(mesh=(2, 1, 1, 1, 1)).to_layout("leaves")


@pytest.fixture(scope="module")
def pair(model, tokenizer):
    """An engine with two replicas, each on one device."""
    return eSurge(model, tokenizer, **OPTIONS)


def buffers(arrays):
    return {s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards}


@pytest.mark.proves("data_parallelism_axis")
@pytest.mark.nightly
def test_two_replicas_produce_same_outputs_as_one(one, pair, prompts):
    expected = one.generate(prompts, PARAMS)
    compiled = pair.stats()["num_compiled"]
    seeds = [out.seed for out in expected]
    outputs = pair.generate(prompts, PARAMS)
    assert tokens_of(outputs) == tokens_of(expected)
    assert [out.seed for out in outputs] == seeds
    for ours, theirs in zip(outputs, expected, strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        if b.logprobs is not None:
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)
    pooled = [engine.embed(prompts, PoolingParams(pooling="mean")) for engine in (one, pair)]
    for ours, theirs in zip(*pooled, strict=True):
        np.testing.assert_allclose(ours.pooled, theirs.pooled, atol=1e-4)
    assert pair.stats()["num_compiled"] == compiled  # no compilation after the engine was ready
    steps = [stats["num_steps"] for stats in pair.replica_stats()]
    assert min(steps) > 0
    assert sum(steps) == pair.stats()["num_steps"]
    assert pair.stats()["kv_cache_usage"] == 0


@pytest.mark.nightly
def test_each_replica_uses_its_own_device(pair, model):
    own = [x for loop in pair.loop.loops for x in loop.runner.weights._own]
    assert buffers(own) == buffers(jax.tree.leaves(nnx.state(model)))  # the weights are not copied
    places = []
    for loop in pair.loop.loops:
        arrays = (loop.runner.weights.leaves, loop.runner.memory.cache)
        leaves = jax.tree.leaves(arrays)
        places.append({device.id for leaf in leaves for device in leaf.sharding.device_set})
    assert places == [{0}, {1}]
    assert "2 replicas, each with" in pair.describe()


@pytest.mark.nightly
def test_prompt_is_routed_to_the_replica_with_its_prefix(pair, prompts):
    prompt = [7, *prompts[3]]
    pair.generate([[9] * 30, prompt, [8] * 30], GREEDY)
    before = pair.replica_stats()
    for _ in range(3):
        out = pair.generate(prompt, GREEDY)[0]
        assert out.metrics.num_cached_tokens == len(prompt) // 8 * 8
    after = pair.replica_stats()
    hits = [[stats["prefix_cache_hits"] for stats in each] for each in (before, after)]
    grown = [now - then for then, now in zip(*hits, strict=True)]
    assert sorted(grown) == [0, 3 * (len(prompt) // 8 * 8)]


@pytest.mark.nightly
def test_slow_replica_does_not_delay_others(pair, prompts, monkeypatch):
    expected = tokens_of(pair.generate(prompts[:2], GREEDY))
    working = True

    class Late(StepResult):
        @property
        def ready(self):
            return not working

    slow = pair.loop.loops[0].runner
    run = slow.run

    def late(plan):
        result = run(plan)
        result.__class__ = Late
        return result

    monkeypatch.setattr(slow, "run", late)
    names = {}
    for index in range(2):
        pair.add_request(str(index), prompts[index], GREEDY)
        names[pair.loop._router.find(str(index))] = index
    outputs = []
    while not any(out.finished for out in outputs):
        outputs += pair.step()
    assert {out.request_id for out in outputs} == {str(names[1])}
    working = False
    while pair.has_unfinished_requests:
        outputs += pair.step()
    for index in range(2):
        mine = [out for out in outputs if out.request_id == str(index)]
        assert [[t for out in mine for t in out.outputs[0].token_ids]] == expected[index]


@pytest.mark.nightly
def test_failed_request_affects_no_other_replica(pair, prompts, monkeypatch):
    expected = tokens_of(pair.generate(prompts, GREEDY))
    for loop in pair.loop.loops:
        run = loop.runner.run

        def fail(plan, run=run):
            for new in plan.started:
                if new.request_id.startswith("bad"):
                    raise RequestError(new.request_id) from RuntimeError("broken")
            return run(plan)

        monkeypatch.setattr(loop.runner, "run", fail)
    for index, prompt in enumerate(prompts):
        pair.add_request(f"good{index}", prompt, GREEDY)
    pair.add_request("bad", prompts[1], GREEDY)
    with pytest.raises(ConfigError, match="in use"):
        pair.add_request("good0", prompts[0], GREEDY)
    tokens, ended = {}, {}
    while pair.has_unfinished_requests:
        for out in pair.step():
            tokens.setdefault(out.request_id, []).extend(out.outputs[0].token_ids)
            if out.finished:
                ended[out.request_id] = out
    assert "broken" in ended["bad"].error
    assert [[tokens[f"good{index}"]] for index in range(len(prompts))] == expected
    assert pair.stats()["kv_cache_usage"] == 0


@pytest.mark.nightly
def test_replicas_support_abort_and_pause(pair, prompts):
    expected = tokens_of(pair.generate(prompts[:4], GREEDY))
    for index, prompt in enumerate(prompts[:4]):
        pair.add_request(str(index), prompt, GREEDY)
    pair.add_request("gone", prompts[0], GREEDY)
    outputs = pair.step()
    assert pair.abort_request("gone")
    pair.add_request("gone", prompts[0], GREEDY)  # the id can be reused
    assert pair.abort_request("gone")
    assert not pair.abort_request("gone")
    pair.sleep()
    assert pair.paused
    assert not any(loop.runner.allocated for loop in pair.loop.loops)
    outputs += pair.step()
    pair.wake_up()
    while pair.has_unfinished_requests:
        outputs += pair.step()
    got = [
        [[t for o in outputs if o.request_id == str(i) for t in o.outputs[0].token_ids]]
        for i in range(4)
    ]
    assert got == expected
    assert sum(o.finished for o in outputs if o.request_id == "gone") == 2
    first, second = (pair.stream(prompt, GREEDY) for prompt in prompts[:2])
    read = [[], []]
    for both in zip(first, second, strict=True):
        for tokens, out in zip(read, both, strict=True):
            tokens += out.outputs[0].token_ids
    assert [[tokens] for tokens in read] == expected[:2]


@pytest.mark.nightly
def test_weight_updates_reach_every_replica(one, pair, make_llama, prompts, llama):
    other = make_llama(seed=2, mesh=(2, 1, 1, 1, 1)).to_layout("leaves")
    before = tokens_of(pair.generate(prompts, GREEDY))
    one.update_model_weights(make_llama(seed=2))
    expected = tokens_of(one.generate(prompts, GREEDY))
    one.update_model_weights(llama)
    pair.update_model_weights(make_llama(seed=2))  # from one device
    assert tokens_of(pair.generate(prompts, GREEDY)) == expected
    pair.update_model_weights(make_llama(mesh=(1, 2, 1, 2, 1)))  # sharded over other devices
    assert tokens_of(pair.generate(prompts, GREEDY)) == before
    theirs = buffers(jax.tree.leaves(nnx.state(other)))
    with pair.weights(other):
        for loop in pair.loop.loops:
            assert buffers(loop.runner.weights._own) < theirs  # without a copy
        assert tokens_of(pair.generate(prompts, GREEDY)) == expected
    with pytest.raises(EasyDeLError, match="no weights"):
        pair.generate(prompts[0], GREEDY)
    pair.update_model_weights(llama)
    assert tokens_of(pair.generate(prompts, GREEDY)) == before


@pytest.mark.nightly
def test_weights_with_nan_fail_every_request(pair, llama, prompts):
    before = tokens_of(pair.generate(prompts[:3], GREEDY))
    broken = nnx.state(llama.to_layout("leaves"))
    broken = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), broken)
    pair.update_model_weights(broken)
    with pytest.raises(EasyDeLError, match="not finite"):
        pair.generate(prompts[:3], GREEDY)
    pair.update_model_weights(llama)
    while pair.has_unfinished_requests:
        pair.step()
    assert tokens_of(pair.generate(prompts[:3], GREEDY)) == before


def adapted(model):
    model = model.apply_lora(LoraSpec(rank=2, alpha=4.0), name="one")
    for index, (_, layer) in enumerate(lora_layers(model)):
        key = jax.random.key(index)
        layer.lora_b.set_value(0.3 * jax.random.normal(key, layer.lora_b.shape))
    return model


@pytest.mark.nightly
def test_adapters_are_loaded_on_all_replicas_or_none(one, pair, llama, prompts, tokenizer):
    for engine in (one, pair):
        engine.load_lora_adapter("a", adapted(llama))
    names = ["a", None] * 4
    expected = tokens_of(one.generate(prompts, GREEDY, lora_name=names))
    assert tokens_of(pair.generate(prompts, GREEDY, lora_name=names)) == expected
    # One replica still uses the slot of an unloaded adapter.
    pair.add_request("long", prompts[0], GREEDY.replace(max_tokens=60), lora_name="a")
    pair.step()
    for engine in (one, pair):
        engine.unload_lora_adapter("a")
    with pytest.raises(ConfigError, match="still in use"):
        pair.load_lora_adapter("b", adapted(llama))
    assert pair.list_lora_adapters() == []
    pair.abort_request("long")
    pair.step()
    pair.load_lora_adapter("b", adapted(llama))
    assert tokens_of(pair.generate(prompts, GREEDY, lora_name=["b", None] * 4)) == expected
    pair.unload_lora_adapter("b")


@pytest.mark.nightly
def test_server_metrics_list_each_replica(pair, prompts):
    with background(pair, served_model_name="m") as url:
        for prompt in prompts[:3]:
            body = {"model": "m", "prompt": prompt, "max_tokens": 3}
            assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 200
        text = httpx.get(url.replace("/v1", "/metrics")).text
    for index in (0, 1):
        assert f'vllm:num_requests_running{{engine="{index}",model_name="m"}} 0.0' in text


@pytest.mark.nightly
def test_async_engine_serves_requests_of_both_replicas(pair, prompts):
    expected = tokens_of(pair.generate(prompts, GREEDY))
    engine = AsyncEngine(pair)
    engine.start()

    async def tokens(index):
        deltas = engine.generate(prompts[index], GREEDY, f"r{index}")
        return [[token async for delta in deltas for token in delta.outputs[0].token_ids]]

    async def everything():
        return await asyncio.gather(*(tokens(index) for index in range(len(prompts))))

    try:
        assert asyncio.run(everything()) == expected
        assert engine.is_healthy
    finally:
        engine.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "axis", "options"),
    [
        ((4, 1, 1, 2, 1), "dp", {"overlap_execution": True}),
        ((8, 1, 1, 1, 1), "dp", {"use_aot_forward": False}),
        ((2, 2, 1, 2, 1), "dp", {"batch_invariant": True}),
        ((1, 4, 1, 2, 1), "fsdp", {}),  # each replica needs the whole weights, which are sharded
        ((2, 1, 1, 2, 1), "dp", {"speculative_config": {"method": "ngram"}}),
    ],
)
def test_replicas_of_other_meshes_produce_the_same_tokens(
    one, make_llama, tokenizer, prompts, mesh, axis, options
):
    options = {**OPTIONS, "max_loras": 0, "max_lora_rank": 16, **options}
    engine = eSurge(make_llama(mesh=mesh), tokenizer, data_parallelism_axis=axis, **options)
    assert len(engine.replica_stats()) == max(mesh[:2])
    compiled = engine.stats()["num_compiled"]
    for _ in range(2):
        expected = tokens_of(one.generate(prompts, PARAMS[:2] * 4))
        assert tokens_of(engine.generate(prompts, PARAMS[:2] * 4)) == expected
    assert engine.stats()["num_compiled"] == compiled


@pytest.mark.nightly
def test_replica_axis_can_be_named_or_disabled(make_llama, prompts):
    options = {**OPTIONS, "compile_runner": False}
    whole = eSurge(make_llama(mesh=(2, 1, 1, 1, 1)), data_parallelism_axis=None, **options)
    assert len(whole.replica_stats()) == 1
    assert whole.loop.runner.model.config.mesh.shape["dp"] == 2
    with pytest.raises(MeshError, match="no axis 'pd'"):
        eSurge(make_llama(mesh=(2, 1, 1, 1, 1)), data_parallelism_axis="pd", **options)
    assert EngineConfig().data_parallelism_axis == "dp"


# ---- the router alone


def placed(router, name, prompt, known, most=16, n=1):
    where = router.choose(prompt, known)
    router.place(name, where, prompt - known[where], n, most)
    return where


def test_router_spreads_requests_evenly_over_replicas():
    router = ReplicaRouter(4)
    assert [placed(router, str(i), 10, [0] * 4) for i in range(8)] == [0, 1, 2, 3] * 2
    for name in "04":  # the first replica has finished its work
        router.finish_request(name, 16)
    assert [placed(router, f"n{i}", 10, [0] * 4) for i in range(3)] == [0, 0, 1]


def test_router_prefers_the_prefix_unless_its_replica_is_busier():
    router = ReplicaRouter(2)
    where = [placed(router, str(i), 100, [90, 0], most=20) for i in range(6)]
    assert where == [0, 0, 0, 1, 0, 0]
    assert router.find("3") == 1
    router.finish_request("3", 20)
    assert router.find("3") is None


def test_router_weighs_requests_by_usual_completion_length():
    router = ReplicaRouter(2)
    for i in range(200):  # answers of four tokens, independent of `max_tokens`
        name = str(i)
        placed(router, name, 4, [0, 0], most=1000)
        router.finish_request(name, 4)
    # Three short prompts with short answers are less work than one long prompt.
    assert placed(router, "long", 60, [0, 0], most=1000) == 0
    assert [placed(router, f"s{i}", 4, [0, 0], most=1000) for i in range(3)] == [1, 1, 1]
