"""Adapters that start as a part of the weights (PiSSA, OLoRA) train and are saved as in PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_models.adapters.decomposition import decompose_matrix
from ed_models.adapters.lora import apply_lora, lora_layers, merge_lora, remove_lora
from ed_models.adapters.peft import load_adapter, save_adapter
from ed_models.adapters.values import LayerAdapter, get_adapter
from ed_models.conformance import forward
from flax import nnx

from tests.parity.peft_cases import our_logits
from tests.parity.test_parity_peft import base_of, logits_of, subject_of

pytestmark = pytest.mark.torch
peft = pytest.importorskip("peft")

TARGETS = ("q_proj", "down_proj")
VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "rslora": {"rslora": True, "alpha": 7.0}}
#: Values of the initial matrices, and logits of tiny models.
BOUND = 1e-5


def build_peft_model(start: str, spec: LoraSpec) -> Any:
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.rank if spec.alpha is None else spec.alpha,
        use_rslora=spec.rslora,
        use_dora=spec.dora,
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
        init_lora_weights=start,
    )
    return peft.get_peft_model(base_of(subject_of("llama")), config)


def list_peft_layers(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name.removeprefix("base_model.model.") + ".kernel", module


def build_model(start: str, **settings: Any) -> Any:
    spec = LoraSpec(rank=4, targets=TARGETS, init_lora_weights=start, **settings)
    return apply_lora(subject_of("llama").model, spec, key=jax.random.key(1))


def change(model: Any) -> Any:
    """Return a model whose adapters have been changed."""
    for i, (_, layer) in enumerate(lora_layers(model)):
        for name in ("lora_a", "lora_b"):
            variable = getattr(layer, name)
            noise = 0.1 * jax.random.normal(jax.random.key(i), variable.shape)
            variable.set_value(variable.get_value() + noise)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_initial_matrices_and_remaining_weights_equal_peft(start: str, variant: str) -> None:
    model = build_model(start, **VARIANTS[variant])
    adapter = get_adapter(model)
    spec = next(x.spec for x in adapter.values() if isinstance(x, LayerAdapter))
    weights = get_weights(model)
    theirs = dict(list_peft_layers(build_peft_model(start, spec)))
    assert theirs.keys() == adapter.keys()
    for name, layer in theirs.items():
        a, b = (
            getattr(layer, matrix)["default"].weight.detach().numpy().T
            for matrix in ("lora_A", "lora_B")
        )
        ours = adapter[name]
        assert isinstance(ours, LayerAdapter)
        assert ours.initial_a is not None
        assert ours.initial_b is not None
        signs = np.sign((a * ours.a).sum(0))  # of each pair of vectors
        np.testing.assert_allclose(ours.a, a * signs, atol=BOUND)
        np.testing.assert_allclose(ours.b, b * signs[:, None], atol=BOUND)
        np.testing.assert_array_equal(ours.initial_a, ours.a)
        np.testing.assert_array_equal(ours.initial_b, ours.b)
        remaining = weights[name] - spec.scale * ours.initial_a @ ours.initial_b
        expected = layer.get_base_layer().weight.detach().numpy().T
        np.testing.assert_allclose(remaining, expected, atol=BOUND)


def get_weights(model: Any) -> dict[str, np.ndarray]:
    """Return the weights of the layers with adapters, by canonical name."""
    from ed_infra import parameter_names

    weights = {}
    for path, layer in lora_layers(model):
        path = parameter_names.normalize_parameter_name(path)
        values = np.asarray(layer.kernel.get_value())
        for i, name in enumerate(parameter_names.canonical(path)):
            weights[f"{name}.kernel"] = values[i] if values.ndim == 3 else values
    return weights


def compute_loss(logits: Any, ids: Any, library: Any) -> Any:
    """Return the cross-entropy of the next tokens, with functions of jax or torch."""
    scores = library.log_softmax(logits[:, :-1], -1)
    rows = np.arange(ids.shape[0])[:, None], np.arange(ids.shape[1] - 1)[None]
    return -scores[(*rows, ids[:, 1:])].mean()


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["pissa", "olora"])
@pytest.mark.parametrize("dora", [False, True])
def test_steps_of_training_have_the_losses_of_peft(start: str, dora: bool) -> None:
    import torch

    ids, rate = subject_of("llama").ids, 20.0
    model = build_model(start, dora=dora)
    graphdef, params, other = nnx.split(model, nnx.LoRAParam, ...)
    spec = next(lora_layers(model))[1].spec
    theirs = build_peft_model(start, spec)
    optimizer = torch.optim.SGD([x for x in theirs.parameters() if x.requires_grad], lr=rate)

    def run(params: nnx.State) -> jax.Array:
        logits = forward(nnx.merge(graphdef, params, other), input_ids=ids).logits
        return compute_loss(logits, ids, jax.nn)

    step = jax.jit(jax.value_and_grad(run))
    losses, expected = [], []
    for _ in range(4):
        loss, gradients = step(params)
        params = jax.tree.map(lambda x, g: x - rate * g, params, gradients)
        losses.append(float(loss))
        optimizer.zero_grad()
        rows = torch.tensor(ids, dtype=torch.long)
        their_loss = compute_loss(theirs(rows).logits, rows, torch.nn.functional)
        their_loss.backward()
        optimizer.step()
        expected.append(their_loss.item())
    assert losses[-1] < losses[0] - 1e-3
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


@pytest.mark.daily("pissa-plain")
@pytest.mark.parametrize("variant", [*VARIANTS, "dora"])
@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4"])
def test_saved_adapter_fits_the_original_base_in_peft(
    start: str, variant: str, tmp_path: Path
) -> None:
    subject = subject_of("llama")
    model = build_model(start, **VARIANTS.get(variant, {"dora": True}))
    np.testing.assert_allclose(our_logits(model, subject.ids), subject.logits, atol=BOUND)
    logits = our_logits(change(model), subject.ids)
    assert np.abs(logits - subject.logits).max() > 1e-3
    save_adapter(model, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["r"] == 8
    assert settings.get("init_lora_weights", True) is True
    loaded = peft.PeftModel.from_pretrained(base_of(subject), tmp_path).eval()
    np.testing.assert_allclose(logits_of(loaded, subject.ids), logits, atol=2 * BOUND)
    again = load_adapter(subject.model, tmp_path)
    np.testing.assert_allclose(our_logits(again, subject.ids), logits, atol=BOUND)
    np.testing.assert_allclose(our_logits(merge_lora(model), subject.ids), logits, atol=BOUND)
    before, after = (jax.tree.leaves(nnx.state(x)) for x in (subject.model, remove_lora(model)))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def test_iterations_find_the_largest_singular_values() -> None:
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 24)))[0] for n in (40, 24))
    weight = left * 0.7 ** np.arange(24) @ right.T
    specs = [LoraSpec(rank=4, init_lora_weights=x) for x in ("pissa", "pissa_niter_16")]
    exact, found = ((a @ b) for a, b in (decompose_matrix(weight, spec) for spec in specs))
    np.testing.assert_allclose(found, exact, atol=1e-5)
    assert np.linalg.norm(weight - exact, 2) == pytest.approx(0.7**4, rel=1e-5)


def test_rank_above_the_size_of_a_matrix_adds_zeros() -> None:
    weight = np.random.default_rng(0).normal(size=(6, 3))
    for start in ("pissa", "olora"):
        a, b = decompose_matrix(weight, LoraSpec(rank=5, init_lora_weights=start))
        assert (a.shape, b.shape) == ((6, 5), (5, 3))
        np.testing.assert_allclose(a @ b, weight, atol=BOUND)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_quantized_weights_are_refused_by_name(start: str) -> None:
    model = subject_of("llama").model.quantize({"dtype": "int8"})
    spec = LoraSpec(rank=2, init_lora_weights=start)
    with pytest.raises(ConfigError, match=f"'{start}' decomposes the weights.*are quantized"):
        apply_lora(model, spec)


@pytest.mark.parametrize("start", ["eva", "corda", "lora_ga", "pissa_niter_0", False])
def test_other_initial_values_are_refused_by_name(start: Any) -> None:
    with pytest.raises(ConfigError, match=f"init_lora_weights {start!r}"):
        LoraSpec(init_lora_weights=start)
