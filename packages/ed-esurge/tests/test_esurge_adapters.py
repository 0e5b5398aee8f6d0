"""LoRA adapters selected by name: a mixed batch produces the tokens of each adapter alone."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest
from ed_esurge import AsyncEngine, PoolingParams, SamplingParams, eSurge
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.specs import LoraSpec
from ed_models.adapters.lora import lora_layers

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)
NAMES = (None, "one", "two", "three", "one", None, "three", "two")
SPECS = {
    "one": LoraSpec(rank=2, alpha=4.0),
    "two": LoraSpec(rank=4, targets=("q_proj", "down_proj")),
    "three": LoraSpec(rank=3, alpha=2.0, rslora=True, targets=r"layers\.1\."),
}
OPTIONS = {
    "max_num_seqs": 8,
    "page_size": 8,
    "max_num_batched_tokens": 24,
    "max_num_seq_buckets": (8,),
    "max_model_len": 64,
    "silent_mode": True,
}


def adapted(model, name, spec=None):
    """Return a model with an adapter that changes the output strongly."""
    model = model.apply_lora(spec or SPECS[name], name=name)
    for i, (_, layer) in enumerate(lora_layers(model)):
        key = jax.random.fold_in(jax.random.key(len(name)), i)
        layer.lora_b.set_value(0.3 * jax.random.normal(key, layer.lora_b.shape))
    return model


@pytest.fixture(scope="module")
def folders(llama, tmp_path_factory):
    made = {}
    for name in SPECS:
        made[name] = tmp_path_factory.mktemp(name)
        adapted(llama, name).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def engine(llama, tokenizer, folders):
    made = eSurge(llama, tokenizer, max_loras=3, max_lora_rank=4, **OPTIONS)
    made.load_lora_adapter("one", folders["one"])
    made.load_lora_adapter("two", str(folders["two"]))
    made.load_lora_adapter("three", adapted(llama, "three"))
    return made


@pytest.fixture(scope="module")
def merged(llama, tokenizer):
    """Engines of the base model, and of the model merged with each adapter."""
    engines = {None: eSurge(llama, tokenizer, compile_runner=False, **OPTIONS)}
    for name in SPECS:
        model = adapted(llama, name).unwrap_lora_to_layers()
        engines[name] = eSurge(model, tokenizer, compile_runner=False, **OPTIONS)
    return engines


@pytest.fixture(scope="module")
def alone(merged, prompts):
    return [
        merged[name].generate(prompt, GREEDY)[0]
        for name, prompt in zip(NAMES, prompts, strict=True)
    ]


def same(got, expected, bound=2e-5):
    for ours, other in zip(got, expected, strict=True):
        assert ours.outputs[0].token_ids == other.outputs[0].token_ids
        for mine, theirs in zip(
            [*ours.outputs[0].logprobs, *ours.prompt_logprobs[1:]],
            [*other.outputs[0].logprobs, *other.prompt_logprobs[1:]],
            strict=True,
        ):
            token = next(iter(mine))
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=bound)


@pytest.mark.nightly
@pytest.mark.proves("max_loras", "max_lora_rank")
def test_mixed_batch_of_adapters_produces_tokens_of_each_merged_model(engine, alone, prompts):
    same(engine.generate(prompts, GREEDY, lora_name=NAMES), alone)
    tokens = {
        tuple(one.outputs[0].token_ids)
        for one in engine.generate([prompts[3]] * 4, GREEDY, lora_name=[None, *SPECS])
    }
    assert len(tokens) == 4, "each adapter changes the tokens"


@pytest.mark.nightly
def test_request_without_adapter_equals_the_base_model_bitwise(engine, merged, prompts):
    """Also in a batch with adapters."""
    expected = merged[None].generate(prompts[3], GREEDY)[0]
    got = engine.generate([prompts[3], prompts[4]], GREEDY, lora_name=[None, "one"])[0]
    same([got], [expected], bound=0)


@pytest.mark.nightly
def test_adapter_that_started_from_the_weights_equals_its_merged_model(llama, prompts, tmp_path):
    spec = LoraSpec(rank=2, targets=("q_proj", "down_proj"), init_lora_weights="pissa")
    model = adapted(llama, "pissa", spec)
    expected = eSurge(model.unwrap_lora_to_layers(), compile_runner=False, **OPTIONS)
    engine = eSurge(llama, max_loras=2, max_lora_rank=4, compile_runner=False, **OPTIONS)
    model.save_pretrained(tmp_path)
    engine.load_lora_adapter("model", model)
    engine.load_lora_adapter("folder", tmp_path)
    answers = expected.generate([prompts[3]] * 2, GREEDY)
    same(engine.generate([prompts[3]] * 2, GREEDY, lora_name=["model", "folder"]), answers)
    assert {loaded.rank for loaded in engine.list_lora_adapters()} == {4}


@pytest.mark.nightly
def test_dora_adapter_equals_its_merged_model_until_the_weights_change(
    llama, make_llama, merged, prompts
):
    spec = LoraSpec(rank=2, targets=("q_proj", "down_proj"), dora=True)
    model = adapted(llama, "dora", spec)
    for _, layer in lora_layers(model):
        layer.lora_magnitude.set_value(layer.lora_magnitude.get_value() * 1.3)
    expected = eSurge(model.unwrap_lora_to_layers(), compile_runner=False, **OPTIONS)
    engine = eSurge(llama, max_loras=2, max_lora_rank=4, compile_runner=False, **OPTIONS)
    engine.load_lora_adapter("one", adapted(llama, "one"))
    engine.load_lora_adapter("dora", model)
    names = ("dora", None, "one")
    got = engine.generate([prompts[3]] * 3, GREEDY, lora_name=names)
    same(got[:1], expected.generate(prompts[3], GREEDY))
    same(got[1:2], merged[None].generate(prompts[3], GREEDY), bound=0)
    same(got[2:], merged["one"].generate(prompts[3], GREEDY))
    with pytest.raises(ConfigError, match="'dora' uses DoRA, which depends on the weights"):
        engine.update_model_weights(make_llama(seed=5))
    engine.unload_lora_adapter("dora")
    engine.update_model_weights(make_llama(seed=5))


@pytest.mark.nightly
def test_loading_and_unloading_adapters_compiles_nothing(llama, engine, folders, prompts, merged):
    traces = engine.stats()["num_compiled"]
    expected = {name: merged[name].generate(prompts[3], GREEDY) for name in ("one", "two", "three")}
    with pytest.raises(ConfigError, match=r"max_loras 3 adapters are loaded \(one, two, three\)"):
        engine.load_lora_adapter("four", folders["one"])
    engine.unload_lora_adapter("two")
    assert [loaded.name for loaded in engine.list_lora_adapters()] == ["one", "three"]
    # The same slot and the same tokens: neither weights nor pages of the first adapter remain.
    engine.load_lora_adapter("four", adapted(llama, "four", LoraSpec(rank=1)))
    four = engine.generate(prompts[3], GREEDY, lora_name="four")
    assert four[0].outputs[0].token_ids != expected["two"][0].outputs[0].token_ids
    same(engine.generate(prompts[3], GREEDY, lora_name="one"), expected["one"])
    engine.unload_lora_adapter("four")
    engine.load_lora_adapter("two", folders["two"])
    for name in SPECS:
        same(engine.generate(prompts[3], GREEDY, lora_name=name), expected[name])
    assert engine.stats()["num_compiled"] == traces
    loaded = {one.name: one for one in engine.list_lora_adapters()}
    assert (loaded["two"].rank, loaded["two"].source) == (4, str(folders["two"]))
    assert loaded["two"].number > loaded["three"].number


@pytest.mark.nightly
def test_prefix_cache_separates_adapters(llama, folders, prompts, merged):
    engine = eSurge(llama, max_loras=2, max_lora_rank=4, compile_runner=False, **OPTIONS)
    engine.load_lora_adapter("one", folders["one"])

    def hits(**options):
        before = engine.stats()["prefix_cache_hits"]
        out = engine.generate(prompts[3], GREEDY, **options)
        expected = merged[options.get("lora_name")].generate(prompts[3], GREEDY)
        assert out[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
        return engine.stats()["prefix_cache_hits"] - before

    # Prompt log-probabilities would disable the prefix cache.
    plain = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def cached(name):
        before = engine.stats()["prefix_cache_hits"]
        engine.generate(prompts[3], plain, lora_name=name)
        return engine.stats()["prefix_cache_hits"] - before

    assert cached(None) == 0
    assert cached(None) > 0
    assert cached("one") == 0, "pages of the model itself are of no use"
    assert cached("one") > 0
    engine.unload_lora_adapter("one")
    engine.load_lora_adapter("one", folders["two"])
    assert cached("one") == 0, "another adapter, under the name of the first, in its place"
    assert hits() == 0


@pytest.mark.nightly
def test_unloaded_adapter_is_freed_after_its_requests(llama, folders, prompts, merged):
    engine = eSurge(llama, max_loras=1, max_lora_rank=4, compile_runner=False, **OPTIONS)
    engine.load_lora_adapter("one", folders["one"])
    engine.add_request("running", prompts[3], GREEDY, lora_name="one")
    prepared = engine.prepare("late", prompts[3], GREEDY, lora_name="one")
    outputs = engine.step()
    engine.unload_lora_adapter("one")
    with pytest.raises(ConfigError, match="unknown LoRA adapter 'one'"):
        engine.add_request("new", prompts[3], GREEDY, lora_name="one")
    with pytest.raises(ConfigError, match="was unloaded: load the adapter again"):
        engine.execute(prepared)
    with pytest.raises(ConfigError, match="1 that were unloaded are still in use"):
        engine.load_lora_adapter("two", folders["two"])
    while engine.has_unfinished_requests:
        outputs += engine.step()
    tokens = [token for out in outputs for token in out.outputs[0].token_ids]
    assert tokens == merged["one"].generate(prompts[3], GREEDY)[0].outputs[0].token_ids
    engine.load_lora_adapter("two", folders["two"])
    same(
        engine.generate(prompts[3], GREEDY, lora_name="two"),
        merged["two"].generate(prompts[3], GREEDY),
    )


@pytest.mark.nightly
def test_unsupported_adapters_raise_config_error(llama, make_llama, engine, tmp_path, prompts):
    def refused(spec, *said):
        model = adapted(llama, "x", spec)
        with pytest.raises(ConfigError) as error:
            loading.load_lora_adapter("x", model)
        for part in said:
            assert part in str(error.value)

    loading = eSurge(
        llama,
        max_loras=1,
        max_lora_rank=2,
        lora_targets=("self_attn",),
        compile_runner=False,
        **OPTIONS,
    )
    refused(LoraSpec(rank=3, targets="q_proj"), "layers.0.self_attn.q_proj: rank 3 is above 2")
    refused(
        LoraSpec(rank=2, targets=("up_proj", "embed")),
        "a layer that serves no",
        "embedding",
        "merge it",
    )
    with pytest.raises(ConfigError, match="has no active adapter: select one"):
        loading.load_lora_adapter("x", llama)
    broken = adapted(llama, "x", LoraSpec(rank=2, targets="q_proj"))
    next(lora_layers(broken))[1].lora_b.set_value(np.full((1, 2, 32), np.nan)[0])
    with pytest.raises(ConfigError, match="not finite"):
        loading.load_lora_adapter("x", broken)
    other = make_llama(num_key_value_heads=2)
    adapted(other, "x", LoraSpec(rank=2, targets="k_proj")).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"another model[\s\S]*k_proj: A"):
        loading.load_lora_adapter("x", tmp_path)
    assert loading.list_lora_adapters() == []
    with pytest.raises(ConfigError, match="did you mean 'three'"):
        engine.generate(prompts[0], GREEDY, lora_name="thre")
    with pytest.raises(ConfigError, match="'one' is loaded: unload it first"):
        engine.load_lora_adapter("one", tmp_path)
    plain = eSurge(llama, compile_runner=False, **OPTIONS)
    for call in (
        lambda: plain.load_lora_adapter("x", tmp_path),
        lambda: plain.generate(prompts[0], GREEDY, lora_name="x"),
        lambda: plain.unload_lora_adapter("x"),
    ):
        with pytest.raises(ConfigError, match="build it with max_loras"):
            call()
    with pytest.raises(ConfigError, match="merge it"):
        eSurge(adapted(llama, "one"), max_loras=1, **OPTIONS)
    with pytest.raises(ValueError, match="max_loras is 0"):
        eSurge(llama, max_lora_rank=8, **OPTIONS)


@pytest.mark.nightly
@pytest.mark.proves("lora_targets")
def test_lora_targets_select_the_layers_with_slots(llama, folders, prompts, merged):
    engine = eSurge(
        llama,
        max_loras=1,
        max_lora_rank=4,
        lora_targets=("q_proj", "down_proj"),
        compile_runner=False,
        **OPTIONS,
    )
    engine.load_lora_adapter("two", folders["two"])
    same(
        engine.generate(prompts[3], GREEDY, lora_name="two"),
        merged["two"].generate(prompts[3], GREEDY),
    )
    # q and down in two layers, each with A, B and the gain of DoRA.
    assert len(engine.loop.runner.weights.places) == 12


@pytest.mark.nightly
def test_adapters_remain_after_a_weight_update(llama, make_llama, folders, prompts):
    """The adapters remain, and the pages of the old weights are cleared."""
    engine = eSurge(
        make_llama(seed=5), max_loras=1, max_lora_rank=4, compile_runner=False, **OPTIONS
    )
    engine.load_lora_adapter("one", folders["one"])
    engine.generate(prompts[3], GREEDY, lora_name="one")
    engine.update_model_weights(llama)
    fresh = eSurge(adapted(llama, "one").unwrap_lora_to_layers(), compile_runner=False, **OPTIONS)
    same(engine.generate(prompts[3], GREEDY, lora_name="one"), fresh.generate(prompts[3], GREEDY))


@pytest.mark.nightly
def test_chat_stream_and_embed_accept_an_adapter_name(engine, merged, prompts):
    messages = [{"role": "user", "content": "hello"}]
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answer = engine.chat(messages, plain, lora_name="two")
    assert answer.outputs[0].token_ids == merged["two"].chat(messages, plain).outputs[0].token_ids
    streamed = engine.stream(prompts[3], plain, lora_name="one")
    tokens = [token for delta in streamed for token in delta.outputs[0].token_ids]
    assert tokens == merged["one"].generate(prompts[3], plain)[0].outputs[0].token_ids
    vector = engine.embed(prompts[3], PoolingParams(), lora_name="three")[0].pooled
    expected = merged["three"].embed(prompts[3], PoolingParams())[0].pooled
    np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.nightly
def test_async_engine_loads_and_serves_adapters(engine, folders, merged, prompts):
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def run():
        driver = AsyncEngine(engine)
        driver.start()
        try:
            await driver.unload_lora_adapter("three")
            with pytest.raises(CheckpointError):
                await driver.load_lora_adapter("gone", folders["one"] / "nowhere")
            await driver.load_lora_adapter("three", folders["three"])
            names = [loaded.name for loaded in driver.list_lora_adapters()]
            tokens = []
            async for delta in driver.generate(prompts[3], plain, "r", lora_name="three"):
                tokens += delta.outputs[0].token_ids
            with pytest.raises(ConfigError, match="unknown LoRA adapter"):
                await anext(driver.generate(prompts[3], plain, "s", lora_name="nobody"))
            return names, tokens
        finally:
            driver.shutdown()

    names, tokens = asyncio.run(run())
    assert names == ["one", "two", "three"]
    assert tokens == merged["three"].generate(prompts[3], plain)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("mesh", "stacked"),
    [((1, 1, 1, 4, 1), True), ((1, 2, 1, 2, 1), False)],
)
@pytest.mark.nightly
def test_sharded_engine_produces_same_adapter_outputs(
    make_llama, folders, alone, prompts, mesh, stacked, monkeypatch
):
    from ed_esurge.engine import assembly as module

    if stacked:
        monkeypatch.setattr(module, "served_model", lambda model: model)
    engine = eSurge(make_llama(mesh=mesh), max_loras=3, max_lora_rank=4, **OPTIONS)
    traces = engine.stats()["num_compiled"]
    for name, folder in folders.items():
        engine.load_lora_adapter(name, folder)
    for _ in range(2):
        same(engine.generate(prompts, GREEDY, lora_name=NAMES), alone)
    assert engine.stats()["num_compiled"] == traces
