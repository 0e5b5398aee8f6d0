"""Compare a layer of experts with a dense feed-forward layer of the same active parameters.

uv run python -m tools.bench.experts
uv run python -m tools.bench.experts --experts 64 --per-token 8 --rounds 9

Float32, one layer on one device: a training step (forward and backward, all gradients), a prompt,
and a decode step. The dense layer is as wide as all experts of a token together. The outputs of the
methods are compared first. Figures are medians of interleaved runs, and their ratios.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.context import Ctx
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts
from flax import nnx

from tools.bench.measure import Run, command_line, machine, table, take_turns

METHODS: dict[str, dict[str, Any]] = {
    "standard_moe": {"moe_method": "standard_moe"},
    "fused_moe, grouped products": {"moe_method": "fused_moe", "moe_force_xla_gmm": True},
    "dense_moe": {"moe_method": "dense_moe"},
}
DENSE = "a dense layer"
#: Name -> (rows, tokens of a row, whether gradients are computed).
WORK = {"training": (4, 256, True), "prompt": (4, 256, False), "decoding": (8, 1, False)}


class Config(EasyDeLBaseConfig):
    """Fields that the families add to the base configuration."""

    hidden_act: str = "silu"
    intermediate_size: int = 0


def layers(args: argparse.Namespace) -> dict[str, nnx.Module]:
    """Return the contenders; all layers of experts have the same parameters."""
    size: dict[str, Any] = {
        "hidden_size": args.hidden,
        "num_attention_heads": 1,
        "sharding_axis_dims": (1, 1, 1, 1, 1),
    }
    width = args.width * args.per_token
    config = Config(**size, intermediate_size=width)
    made: dict[str, nnx.Module] = {DENSE: GatedMLP(Parts(config, nnx.Rngs(0)))}
    for name, fields in METHODS.items():
        parts = Parts(Config(**size, **fields), nnx.Rngs(0))
        gate = Router(parts, args.experts, args.per_token)
        experts = Experts(parts, args.experts, args.width)
        made[name] = SparseMLP(parts, gate=gate, experts=experts)
    return made


def runner(layer: nnx.Module, x: jax.Array, *, gradients: bool) -> tuple[Run, jax.Array]:
    """Return a compiled call of a layer, and its output."""
    graphdef, state = nnx.split(layer)
    positions = jnp.zeros(x.shape[:2], jnp.int32)
    ctx = Ctx(positions, {}, mode="train" if gradients else "prefill")

    def forward(state: nnx.State, x: jax.Array) -> jax.Array:
        module: Any = nnx.merge(graphdef, state)
        out = module(x, ctx)
        return out[0] if isinstance(out, tuple) else out

    def loss(state: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(forward(state, x)))

    step = jax.jit(jax.grad(loss, argnums=(0, 1)) if gradients else forward)
    return lambda: jax.block_until_ready(step(state, x)), jax.jit(forward)(state, x)


def measured(args: argparse.Namespace, work: str) -> list[list[str]]:
    """Return the rows of one kind of work: milliseconds, and the ratio to the dense layer."""
    b, s, gradients = WORK[work]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(b, s, args.hidden)), jnp.float32)
    runs, outputs = {}, {}
    for name, layer in layers(args).items():
        runs[name], outputs[name] = runner(layer, x, gradients=gradients)
    for name in METHODS:
        np.testing.assert_allclose(outputs[name], outputs["dense_moe"], atol=1e-5)
    seconds = take_turns(runs, rounds=args.rounds)
    return [
        [work, name, f"{took * 1e3:.2f}", f"{took / seconds[DENSE]:.2f}"]
        for name, took in seconds.items()
    ]


def main() -> None:
    """Print the machine and the table."""
    parser = command_line("experts", __doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="width of one expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(machine())
    print(
        f"{args.experts} experts of width {args.width}, {args.per_token} for a token, hidden size "
        f"{args.hidden}; dense: width {args.width * args.per_token}\n"
    )
    rows = [row for work in WORK for row in measured(args, work)]
    print(table(["work", "layer", "ms", "times the dense layer"], rows))


if __name__ == "__main__":
    main()
