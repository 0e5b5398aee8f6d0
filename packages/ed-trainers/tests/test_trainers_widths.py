"""µP in training: the same updates as with the multipliers of the paper, and a flat coordinate
check."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.tasks.widths import WidthFactors, compute_width_factors, scale_parameters
from ed_trainers.arguments import SFTArguments
from ed_trainers.optimizers import build_optimizer, build_schedule
from flax import nnx

#: The base model; its head has 8 features.
BASE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ONE_DEVICE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
ROWS = np.random.default_rng(3).integers(0, 96, (4, 16))


def build_model(width: int, **fields: Any) -> tuple[LlamaForCausalLM, dict[str, WidthFactors]]:
    """A model of some width with the initial values of µP, and its factors."""
    ratio = width // BASE["hidden_size"]
    sizes = {name: value * (1 if name == "head_dim" else ratio) for name, value in BASE.items()}
    config = LlamaConfig(
        **{
            **sizes,
            "num_hidden_layers": 2,
            "vocab_size": 96,
            "initializer_range": 0.05,
            **ONE_DEVICE,
            **fields,
        }
    )
    model = LlamaForCausalLM.create(config, seed=0)
    factors = compute_width_factors(model, BASE)
    return scale_parameters(model, factors), factors


def train(model: LlamaForCausalLM, steps: int, **arguments: Any) -> tuple[list[float], nnx.State]:
    """Return the losses of some updates, and the trained parameters."""
    options = SFTArguments(**arguments)
    tx = build_optimizer(options, build_schedule(options, steps))
    graphdef, params, other = model.split_module()
    state, losses = tx.init(params), []

    def compute_loss(values: nnx.State) -> jax.Array:
        return nnx.merge(graphdef, values, other).compute_loss(jnp.asarray(ROWS))[0].loss

    @jax.jit
    def step(values: nnx.State, state: Any) -> tuple[nnx.State, Any, jax.Array]:
        loss, grads = jax.value_and_grad(compute_loss)(values)
        updates, state = tx.update(grads, state, values)
        return jax.tree.map(jnp.add, values, updates), state, loss

    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses, params


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
def test_training_equals_torch_with_the_multipliers_of_the_paper(
    tied: bool, tmp_path: Path
) -> None:
    """Weights without multipliers follow those of table 8, with 1/d attention and MuReadout."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.set_num_threads(1)
    rate, steps, decay = 0.01, 6, 0.1
    model, factors = build_model(64, head_dim=16, tie_word_embeddings=tied)
    m, queries = 2.0, (8 / 16) ** 0.5
    model.save_pretrained(tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float64
    )
    with torch.no_grad():  # the values without the multipliers
        for name, value in theirs.named_parameters():
            if "q_proj" in name:
                value /= queries
            if name == ("model.norm.weight" if tied else "lm_head.weight"):
                value *= m
    for layer in theirs.model.layers:
        layer.self_attn.scaling = 8**0.5 / 16
    groups = []
    for name, value in theirs.named_parameters():
        # The input of o_proj is four times as wide: twice the heads, of twice the size.
        ratio = 4 if "o_proj" in name else m if "_proj" in name else 1
        one_decay = 0.0 if "norm" in name else decay * ratio
        groups.append({"params": [value], "lr": rate / ratio, "weight_decay": one_decay})
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-20)
    rows, their_losses = torch.tensor(ROWS), []
    for _ in range(steps):
        logits = theirs(rows).logits / m
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 96), rows[:, 1:].reshape(-1)
        )
        adam.zero_grad()
        loss.backward()
        adam.step()
        their_losses.append(loss.item())

    norm = "norm"
    losses, _ = train(
        model,
        steps,
        learning_rate=rate,
        weight_decay=decay,
        optimizer_kwargs={"b1": 0.9, "b2": 0.999, "eps": 1e-20},
        learning_rate_rules=[(f"^{re.escape(n)}$", one.rate) for n, one in factors.items()],
        weight_decay_rules=[
            (f"^{re.escape(n)}$", 0.0 if norm in n else decay / one.rate)
            for n, one in factors.items()
        ],
    )
    assert losses[0] - losses[-1] > 0.5
    np.testing.assert_allclose(losses, their_losses, rtol=2e-4)


def measure_growth(widths: list[int], *, is_scaled: bool) -> np.ndarray:
    """Return the slopes of log(scale of activations) over log(width), after three updates.

    The activations are the outputs of the layers, and the change of the logits.
    """
    scales = []
    for width in widths:
        model, factors = build_model(width)
        if not is_scaled:
            model = LlamaForCausalLM.create(model.config.replace(), seed=0)
        rules = [(f"^{re.escape(n)}$", one.rate) for n, one in factors.items()]
        graphdef, first, other = model.split_module()
        more = {"learning_rate_rules": rules} if is_scaled else {}
        _, params = train(model, 3, learning_rate=0.01, weight_decay=0.0, **more)

        @jax.jit
        def compute(values: nnx.State, graphdef=graphdef, other=other) -> list[jax.Array]:
            output = nnx.merge(graphdef, values, other)(ROWS, output_hidden_states=True)
            return [*output.hidden_states[1:-1], output.logits]

        *hidden, logits = compute(params)
        arrays = [*hidden, logits - compute(first)[-1]]
        scales.append([float(jnp.sqrt(jnp.mean(jnp.square(array)))) for array in arrays])
    return np.polyfit(np.log(widths), np.log(scales), 1)[0]


@pytest.mark.nightly
def test_activations_stay_flat_over_widths_and_grow_in_the_standard_parametrization() -> None:
    widths = [64, 128, 256, 512]
    flat = measure_growth(widths, is_scaled=True)
    growing = measure_growth([64, 256], is_scaled=False)
    assert np.abs(flat).max() < 0.2, flat
    assert growing.min() > 0.4, growing
