"""New weights of an engine are copied by default, and borrowed within a `with` block."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_infra.errors import ConfigError, EasyDeLError
from flax import nnx

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


OPTIONS = {
    "max_num_seqs": 4,
    "page_size": 8,
    "num_pages": 8,
    "max_num_seq_buckets": (4,),
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "compile_runner": False,
    "silent_mode": True,
}


@pytest.fixture(scope="module")
def engine(llama):
    return eSurge(llama, **OPTIONS)


@pytest.fixture(scope="module")
def expected(make_llama, prompts):
    model = make_llama(seed=2)
    out = model.generate(np.asarray([prompts[3]]), max_new_tokens=8, eos_token_id=[])
    return out.sequences[0, len(prompts[3]) :].tolist()


donate = jax.jit(lambda leaves: [leaf + 1 for leaf in leaves], donate_argnums=0)


def tokens_of(engine, prompt) -> list[int]:
    return engine.generate(prompt, GREEDY)[0].outputs[0].token_ids


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["stacked", "leaves"])
@pytest.mark.parametrize("kind", ["model", "state"])
def test_arrays_can_be_donated_after_a_weight_update(
    engine, make_llama, prompts, expected, kind, layout
):
    model = make_llama(seed=2)
    if layout == "leaves" or kind == "state":
        model = model.to_layout("leaves")
    state = nnx.state(model)
    engine.update_model_weights(model if kind == "model" else state)
    leaves = jax.tree.leaves(state)
    donate(leaves)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert tokens_of(engine, prompts[3]) == expected


@pytest.mark.nightly
def test_host_arrays_can_change_after_a_weight_update(engine, make_llama, prompts, expected):
    state = jax.tree.map(np.array, nnx.state(make_llama(seed=2).to_layout("leaves")))
    engine.update_model_weights(state)
    for leaf in jax.tree.leaves(state):
        leaf[...] = 0
    assert tokens_of(engine, prompts[3]) == expected


@pytest.mark.nightly
def test_borrowed_weights_share_buffers_with_the_model(
    engine, llama, make_llama, prompts, expected
):
    state = nnx.state(make_llama(seed=2).to_layout("leaves"))
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    tokens_of(engine, prompts[3])  # compiles
    traces = engine.stats()["num_compiled"]
    with engine.weights(state) as borrowing:
        assert borrowing is engine
        used = {leaf.unsafe_buffer_pointer() for leaf in engine.loop.runner.weights.leaves}
        assert used == theirs
        assert tokens_of(engine, prompts[3]) == expected
        engine.add_request("left", prompts[3], GREEDY)
        outputs = engine.step()
    donate(jax.tree.leaves(state))
    with pytest.raises(EasyDeLError, match="update_model_weights"):
        engine.step()
    with pytest.raises(EasyDeLError, match="no weights"):
        engine.generate(prompts[0], GREEDY)
    # The unfinished request continues from its tokens with other weights.
    with engine.weights(make_llama(seed=2).to_layout("leaves")):
        while engine.has_unfinished_requests:
            outputs += engine.step()
    tokens = [t for o in outputs if o.request_id == "left" for t in o.outputs[0].token_ids]
    assert tokens == expected
    engine.update_model_weights(llama)
    before = llama.generate(np.asarray([prompts[3]]), max_new_tokens=8, eos_token_id=[])
    assert tokens_of(engine, prompts[3]) == before.sequences[0, 40:].tolist()
    assert engine.stats()["num_compiled"] - traces <= 1  # at most the first decode is compiled


@pytest.mark.nightly
def test_donated_weights_raise_error(make_llama, prompts):
    """An engine shares the arrays of its model."""
    model = make_llama(seed=2).to_layout("leaves")
    engine = eSurge(model, **OPTIONS)
    donate(jax.tree.leaves(nnx.state(model)))
    with pytest.raises(EasyDeLError, match="donates"):
        engine.generate(prompts[0], GREEDY)
    assert not engine.loop.open_requests or engine.abort_request(engine.loop.open_requests[0])
    engine.update_model_weights(make_llama(seed=2))
    assert len(tokens_of(engine, prompts[0])) == 8


@pytest.mark.nightly
def test_weight_update_frees_replaced_weights(llama, make_llama):
    engine = eSurge(make_llama(seed=3), **OPTIONS)
    old = [weakref.ref(leaf) for leaf in engine.loop.runner.weights.leaves]
    engine.update_model_weights(llama)
    gc.collect()
    assert all(leaf() is None for leaf in old)


@pytest.mark.nightly
def test_sleeping_engine_frees_memory_and_resumes_requests(
    engine, llama, make_llama, prompts, expected
):
    engine.update_model_weights(make_llama(seed=2))
    engine.add_request("a", prompts[3], GREEDY)
    given = [engine.step() for _ in range(5)]
    engine.sleep()
    assert engine.paused
    assert not engine.loop.runner.allocated
    assert not engine.step()
    engine.wake_up()
    while engine.has_unfinished_requests:
        given.append(engine.step())
    assert [t for step in given for out in step for t in out.outputs[0].token_ids] == expected
    engine.sleep(level=2)
    with pytest.raises(
        ConfigError, match=r"dropped by sleep\(level=2\): call update_model_weights"
    ):
        engine.wake_up()
    engine.update_model_weights(make_llama(seed=2))
    engine.wake_up()
    assert tokens_of(engine, prompts[3]) == expected
    with pytest.raises(ConfigError, match="is invalid: use 1"):
        engine.sleep(level=3)


@pytest.mark.nightly
def test_weights_moved_to_host_free_device_memory(engine, make_llama, prompts, expected):
    """The test simulates a device with separate memory."""
    engine.update_model_weights(make_llama(seed=2))
    weights = engine.loop.runner.weights
    gone = [weakref.ref(leaf) for leaf in weights.leaves]
    weights.to_host()
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    with pytest.raises(EasyDeLError, match="no weights"):
        weights.leaves  # noqa: B018
    weights.from_host()
    assert tokens_of(engine, prompts[3]) == expected
