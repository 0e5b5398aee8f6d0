"""Pages that the prefix cache evicts are restored from host memory bitwise unchanged."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_esurge import EngineConfig, SamplingParams, eSurge
from ed_esurge.engine.setup import Setup, page_bytes
from ed_esurge.runner.functions import Functions
from ed_esurge.runner.host_pages import COPIES, PAGES_AT_ONCE, HostMemory
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_layers.cache import Format, HybridCache, LayerCacheSpec, PagedCache
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pydantic import ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
MIB = 2.0**-10


def filled(cache, seed: int):
    """Return the cache filled with random bits, including NaN."""
    rng = np.random.default_rng(seed)

    def bits(leaf):
        raw = rng.integers(0, 256, size=leaf.nbytes, dtype=np.uint8)
        return jax.device_put(raw.view(leaf.dtype).reshape(leaf.shape), leaf.sharding)

    return jax.tree.map(bits, cache)


def bits_of(cache, page: int) -> list[bytes]:
    leaves = jax.tree.leaves(cache)
    return [np.take(np.asarray(x), page, x.ndim - 5).tobytes() for x in leaves]


def paged(kind: str, layout: str, num_pages: int = 24) -> PagedCache:
    form = Format(kind) if kind in ("int8", "fp8") else None
    dtype = jnp.bfloat16 if form is not None else kind
    spec = LayerCacheSpec(num_kv_heads=2, head_dim=8)
    options = {"dtype": dtype, "layout": layout, "format": form}
    return PagedCache.create([spec] * 2, num_pages=num_pages, page_size=4, **options)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("bfloat16", "leaves"), ("int8", "stacked"), ("fp8", "leaves"), ("float32", "stacked")],
)
def test_page_copies_are_bitwise_equal(kind, layout):
    cache = filled(paged(kind, layout), 0)
    memory = HostMemory(cache, 40, lambda function: function)
    pages = [*range(20)]
    assert PAGES_AT_ONCE < len(pages) < 2 * PAGES_AT_ONCE, "a second copy, which is not full"
    before = [bits_of(cache, page) for page in range(24)]
    places = {39 - page: page for page in pages}
    cache = memory.move(cache, {"full": (places, {})})
    cache = filled(cache, 1)
    others = [bits_of(cache, page) for page in range(24)]
    assert all(a != b for a, b in zip(before, others, strict=True))
    # Page 23 is saved, and receives the content of page 0 in the same step.
    cache = memory.move(cache, {"full": ({0: 23}, {23: 39, 5: 39 - 7})})
    assert bits_of(cache, 23) == before[0]
    assert bits_of(cache, 5) == before[7]
    for page in {*range(23)} - {5}:
        assert bits_of(cache, page) == others[page]
    cache = memory.move(cache, {"full": ({}, {1: 0, **{page: 39 - page for page in range(2, 19)}})})
    assert bits_of(cache, 1) == others[23]
    assert [bits_of(cache, page) for page in range(2, 19)] == before[2:19]
    of_page = sum(map(len, before[0]))
    assert (memory.bytes_saved, memory.bytes_loaded) == (21 * of_page, 20 * of_page)


def test_host_pages_preserve_groups_and_sharding():
    specs = [LayerCacheSpec(4, 8, window=None), LayerCacheSpec(4, 8, window=6, group="window")]
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    heads = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
    pages = {"full": 4, "window": 3}
    empty = HybridCache.create_paged(
        specs, num_pages=pages, page_size=4, num_states=1, sharding=heads
    )
    cache = filled(empty, 0)
    memory = HostMemory(cache, 2, lambda function: function)
    before = {name: bits_of(part, 1) for name, part in cache.caches.items()}
    cache = memory.move(cache, {"full": ({1: 1}, {}), "window": ({1: 1}, {2: 1})})
    cache = memory.move(cache, {"full": ({}, {3: 1})})
    assert bits_of(cache.caches["full"], 3) == before["full"]
    assert bits_of(cache.caches["window"], 2) == before["window"]
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(empty), strict=True):
        assert one.sharding == other.sharding
        assert len({str(shard.index) for shard in one.addressable_shards}) == 4


OPTIONS = {
    "max_num_seqs": 4,
    "page_size": 4,
    "num_pages": 16,
    "max_model_len": 64,
    "silent_mode": True,
}


@pytest.fixture(scope="module")
def engine(llama):
    """An engine whose outputs are bitwise equal in any batch and with any chunks."""
    return eSurge(llama, batch_invariant=True, kv_offloading_size=MIB, **OPTIONS)


def lines_of(output):
    one = output.outputs[0]
    return one.token_ids, [{k: v.logprob for k, v in line.items()} for line in one.logprobs]


@pytest.mark.nightly
@pytest.mark.proves("kv_offloading_size")
def test_prefix_restored_from_host_memory_is_bitwise_equal(engine):
    """Four prompts of twelve pages alternate in a pool of sixteen pages."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 250, size=49).tolist() for _ in range(4)]
    compiled, expected = engine.stats()["num_compiled"], []
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            (output,) = engine.generate(prompt, GREEDY)
            if not turn:  # every token was computed
                expected.append(lines_of(output))
            assert lines_of(output) == expected[number]
    stats = engine.stats()
    assert stats["num_compiled"] == compiled
    assert stats["prefix_cache_hits"] == 0
    assert stats["external_prefix_cache_hits"] == 8 * 48
    assert stats["external_prefix_cache_queries"] == 12 * 49
    of_page = 2 * 2 * 4 * 4 * 8 * 4  # layers, keys and values, tokens, heads, numbers, float32
    assert stats["kv_offload_load_bytes"] == 8 * 12 * of_page
    assert 0 < stats["kv_offload_store_bytes"] <= 4 * 13 * of_page  # each page is stored once
    places = engine.loop.runner.host.places
    assert places == int(MIB * 2**30) // of_page
    assert 0 < stats["kv_offload_cpu_cache_usage"] <= 1
    # All prompts run concurrently, so that they preempt each other.
    for output, lines in zip(engine.generate(prompts * 2, GREEDY), expected * 2, strict=True):
        assert lines_of(output) == lines
    assert engine.stats()["num_compiled"] == compiled
    assert engine.stats()["kv_cache_usage"] == 0


@pytest.mark.nightly
def test_host_page_cache_separates_salts_and_weight_versions(engine, make_llama):
    prompt, other = [7] * 49, [9] * 49
    engine.loop.scheduler.pages.forget_prefixes()

    def hits(prompt: list[int], salt: str | None) -> int:
        before = engine.stats()["external_prefix_cache_hits"]
        engine.add_request("x", prompt, GREEDY, cache_salt=salt)
        while engine.has_unfinished_requests:
            engine.step()
        return int(engine.stats()["external_prefix_cache_hits"] - before)

    asked = [(prompt, "a"), (other, "a"), (prompt, "b"), (other, None), (prompt, "a")]
    assert [hits(*one) for one in asked] == [0, 0, 0, 0, 48]
    hits(other, None)
    engine.update_model_weights(make_llama(seed=2))
    assert hits(prompt, "a") == 0


@pytest.mark.nightly
def test_sharded_engine_reuses_host_pages_with_same_tokens(make_llama, surge):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 250, size=49).tolist() for _ in range(3)]
    expected = [output.outputs[0].token_ids for output in surge.generate(prompts, GREEDY)]
    model = make_llama(mesh=(1, 2, 1, 2, 1))
    options = {**OPTIONS, "max_num_batched_tokens": 16, "max_num_seq_buckets": (4,)}
    engine = eSurge(model, kv_offloading_size=MIB, **options)
    compiled = engine.stats()["num_compiled"]
    for _ in range(2):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert engine.generate(prompt, GREEDY)[0].outputs[0].token_ids == tokens
    stats = engine.stats()
    assert stats["external_prefix_cache_hits"] == 3 * 48
    assert stats["num_compiled"] == compiled


@pytest.mark.nightly
@pytest.mark.parametrize("stored", [False, True], ids=["offloaded", "stored"])
def test_pages_of_a_draft_model_are_restored_with_those_of_the_model(llama, tmp_path, stored):
    """The draft model has the weights of the model, so all proposals from right pages are accepted.

    Offloaded: three prompts of ten pages alternate in a pool of sixteen. Stored: the engine starts
    again for each turn.
    """
    rng = np.random.default_rng(6)
    prompts = [rng.integers(3, 250, size=41).tolist() for _ in range(3)]
    params = GREEDY.replace(max_tokens=13, logprobs=None)
    options = {**OPTIONS, "kv_offloading_size": MIB, "compile_runner": False}
    options |= {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}
    if stored:
        options |= {"prefix_cache_directory": str(tmp_path / "pages"), "num_pages": 64}
    engine, turns = eSurge(llama, draft_model=llama, **options), []
    for _ in range(3):
        before = engine.stats()
        tokens = [engine.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
        after = engine.stats()
        drafted, accepted, restored = (
            after[name] - before[name]
            for name in (
                "spec_decode_num_draft_tokens",
                "spec_decode_num_accepted_tokens",
                "external_prefix_cache_hits",
            )
        )
        turns.append((tokens, drafted, accepted))
        assert restored == (3 * 40 if len(turns) > 1 else 0)
        if stored:
            engine.terminate()
            engine = eSurge(llama, draft_model=llama, **options)
    assert turns[0][2] > 0.9 * turns[0][1]
    assert turns[1] == turns[2] == turns[0]
    # A place contains a page of each model: layers, keys and values, tokens, heads, numbers.
    assert engine.loop.runner.host.places == int(MIB * 2**30) // (2 * 2 * 2 * 4 * 4 * 8 * 4)


@pytest.mark.parametrize("models", [1, 2], ids=["one_model", "with_draft_model"])
def test_page_budget_reserves_memory_for_copies(llama, monkeypatch, models):
    monkeypatch.setattr(Functions, "workspace_bytes", lambda self: 0)

    def needed(**options) -> int:
        draft = {}
        if models == 2:
            options |= {"speculative_config": {"method": "draft_model"}}
            draft = {"draft": llama}
        setup = Setup.resolve(llama, EngineConfig(**OPTIONS, **options), **draft)
        return setup._workspace({"full": 16})

    more = needed(kv_offloading_size=1) - needed()
    assert more == models * COPIES * PAGES_AT_ONCE * page_bytes(llama, OPTIONS["page_size"])


def test_invalid_host_page_options_raise_error(llama, caplog):
    with pytest.raises(ValidationError, match="enable_prefix_caching is off: set it to true"):
        EngineConfig(kv_offloading_size=1, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"holds no page of 4 tokens, which takes 1\.9\de-06 GiB"):
        eSurge(llama, kv_offloading_size=1e-6, **OPTIONS)
    forget_said()
    with caplog.at_level(logging.WARNING):
        eSurge(llama, kv_offloading_size=MIB, compile_runner=False, **OPTIONS)
    assert "kv_offloading_size is of no use on a CPU" in caplog.text
