"""A served language model keeps matrices with codes of whole numbers in the order of the native
library, and computes the tokens of `generate`."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_layers.native import library
from ed_layers.quantization.panels import CodePanels
from flax import nnx

pytestmark = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)
PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)


def served(model) -> eSurge:
    return eSurge(model, max_num_seqs=2, max_model_len=32, page_size=8, silent_mode=True)


def panels_of(engine: eSurge) -> list[CodePanels]:
    kernels = jax.tree.leaves(
        nnx.state(engine.loop.runner.model), is_leaf=lambda x: isinstance(x, CodePanels)
    )
    return [kernel for kernel in kernels if isinstance(kernel, CodePanels)]


@pytest.mark.parametrize("dtype", ["w8a8", "w4a8"])
@pytest.mark.daily("w4a8")
def test_engine_serves_given_and_new_codes_in_panels(make_llama, monkeypatch, dtype):
    monkeypatch.setenv(library.VARIABLE, "1")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "scan_layers": False}
    models = [
        make_llama(seed=seed, **sizes).quantize([("layers", {"dtype": dtype, "group_size": 32})])
        for seed in (1, 2)
    ]
    wanted = [
        [
            model.generate(np.array([p]), max_new_tokens=8, eos_token_id=[], do_sample=False)
            .sequences[0, len(p) :]
            .tolist()
            for p in PROMPTS
        ]
        for model in models
    ]
    assert wanted[0] != wanted[1]
    engine = served(models[0])
    kind = jnp.uint8 if dtype == "w4a8" else jnp.int8
    assert {panels.codes.dtype for panels in panels_of(engine)} == {jnp.dtype(kind)}
    for number in (0, 1, 0):
        if number:
            engine.update_model_weights(models[number])
        else:
            engine.loop.runner.weights.replace(models[number], copy=False)
        found = engine.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in found] == wanted[number]


def test_engine_keeps_no_plain_copy_of_codes(make_llama, monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "1")
    model = make_llama(hidden_size=128, intermediate_size=256, scan_layers=False)
    model = model.quantize([("layers", {"dtype": "w8a8"})])
    leaves = jax.tree.leaves(nnx.state(model))
    codes = [weakref.ref(x) for x in leaves if x.dtype == jnp.int8 and x.size >= 128 * 128]
    engine = served(model)
    del model, leaves
    gc.collect()
    assert len(codes) == 6 and [array() for array in codes] == [None] * len(codes)
    assert panels_of(engine)
