"""A served language model keeps the matrices of linear layers in the order of the native library,
and computes the tokens of `generate`."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_infra.errors import EasyDeLError
from ed_layers import packing
from ed_layers.native import library
from ed_layers.projections.panels import Panels
from ed_layers.quantization.panels import CodePanels
from flax import nnx

pytestmark = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)
PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)


def served(model) -> eSurge:
    return eSurge(model, max_num_seqs=2, max_model_len=32, page_size=8, silent_mode=True)


def clear_tokens(model, prompt: list[int], margin: float) -> list[int]:
    """Return the greedy tokens of `generate` before the first one with a narrow lead.

    Two programs differ in the last bit of an activation. If it is rounded to 8 bits, the next code
    changes the logits by up to 0.07 here.

    Args:
        margin: smallest lead of the logit of a token over the logits of the others.
    """
    ids = np.array([prompt])
    sequence = model.generate(ids, max_new_tokens=8, eos_token_id=[], do_sample=False).sequences
    best = np.sort(np.asarray(model(sequence).logits[0, len(prompt) - 1 : -1]), axis=-1)
    narrow = best[:, -1] - best[:, -2] < margin
    return sequence[0, len(prompt) :][: narrow.argmax() if narrow.any() else None].tolist()


def panels_of(engine: eSurge) -> list[CodePanels | Panels]:
    kinds = CodePanels, Panels
    kernels = jax.tree.leaves(
        nnx.state(engine.loop.runner.model), is_leaf=lambda x: isinstance(x, kinds)
    )
    return [kernel for kernel in kernels if isinstance(kernel, kinds)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "w8a8", "w4a8"])
@pytest.mark.nightly
def test_engine_serves_given_and_new_matrices_in_panels(make_llama, monkeypatch, dtype):
    monkeypatch.setenv(library.VARIABLE, "1")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "scan_layers": False}
    quantized = dtype in ("w8a8", "w4a8")
    if dtype == "bfloat16":
        sizes |= {"dtype": dtype}
    models = [make_llama(seed=seed, **sizes) for seed in (1, 2)]
    if quantized:
        rules = [("", {"dtype": dtype, "group_size": 32})]  # with the embedding
        models = [model.quantize(rules) for model in models]
    margin = 0.1 if quantized else 0.0
    wanted = [[clear_tokens(model, prompt, margin) for prompt in PROMPTS] for model in models]
    assert all(len(tokens) >= 5 for tokens in ([*first, *second] for first, second in wanted))
    assert wanted[0] != wanted[1]
    engine = served(models[0])
    stored = "uint8" if quantized else dtype
    arrays = [panels.groups if quantized else panels.numbers for panels in panels_of(engine)]
    assert {array.dtype for array in arrays} == {jnp.dtype(stored)}
    for number in (0, 1, 0):
        if number:
            engine.update_model_weights(models[number])
        else:
            engine.loop.runner.weights.replace(models[number], copy=False)
        found = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]
        clear = [ids[: len(tokens)] for ids, tokens in zip(found, wanted[number], strict=True)]
        assert clear == wanted[number]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "w8a8"])
def test_engine_keeps_no_plain_copy_of_matrices(make_llama, monkeypatch, dtype):
    monkeypatch.setenv(library.VARIABLE, "1")
    model = make_llama(hidden_size=128, intermediate_size=256, scan_layers=False)
    if dtype == "w8a8":
        model = model.quantize([("layers", {"dtype": dtype})])
    stored = jnp.int8 if dtype == "w8a8" else jnp.float32
    leaves = jax.tree.leaves(nnx.state(model.model.layers))
    plain = [weakref.ref(x) for x in leaves if x.dtype == stored and x.size >= 128 * 128]
    engine = served(model)
    del model, leaves
    gc.collect()
    assert len(plain) == 6 and [array() for array in plain] == [None] * len(plain)
    assert panels_of(engine)


@pytest.mark.nightly
@pytest.mark.parametrize("first", [True, False])
def test_new_weights_are_packed_as_the_first_ones_although_memory_changed(
    make_llama, monkeypatch, first
):
    monkeypatch.setenv(library.VARIABLE, "1")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "scan_layers": False}
    models = [
        make_llama(seed=seed, **sizes).quantize([("gate_proj", {"dtype": "w8a8"})])
        for seed in (1, 2)
    ]
    monkeypatch.setattr(packing, "available_bytes", lambda: 1 << 40 if first else 0)
    engine = served(models[0])
    numbers = [isinstance(panels, Panels) for panels in panels_of(engine)]
    assert any(numbers) == first and not all(numbers)
    monkeypatch.setattr(packing, "available_bytes", lambda: 0 if first else 1 << 40)
    engine.update_model_weights(models[1])
    wanted = served(models[1]).generate(PROMPTS, GREEDY)
    found = engine.generate(PROMPTS, GREEDY)
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (found, wanted)]
    assert tokens[0] == tokens[1]


@pytest.mark.nightly
def test_engine_refuses_packed_weights_whose_owner_deleted_them(make_llama, monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "1")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "scan_layers": False}
    engine = served(make_llama(**sizes))
    model = make_llama(seed=2, **sizes)
    engine.loop.runner.weights.replace(model, copy=False)
    for leaf in jax.tree.leaves(nnx.state(model)):
        leaf.delete()
    with pytest.raises(EasyDeLError, match="were deleted by their owner"):
        _ = engine.loop.runner.weights.leaves
