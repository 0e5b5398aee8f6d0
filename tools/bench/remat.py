"""Measure each `gradient_checkpointing` policy: memory, recomputed flops, and equal gradients.

    python -m tools.bench.remat
    python -m tools.bench.remat --sequence 2048 --attention blockwise

One training step's gradient of a small Llama of scanned layers is compiled for each policy.

- temp MB: the compiled program's memory for intermediate results (`memory_analysis`), and its ratio
  to that of no policy
- flops of a layer: forward and backward; `cost_analysis` counts the body of a loop once, so the
  figures are per layer. The ratio to no policy shows the recomputed share
- gradient: largest difference to no policy, relative to each parameter's largest gradient
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_layers.depth.remat import BY_NAME, FIXED
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

from tools.bench.measure import command_line

TARGETS = ("attn_output", "mlp_gate")
VOCABULARY = 256


@dataclass(frozen=True)
class Row:
    """Results of one policy: bytes, flops of a layer (forward and backward), gradient error."""

    policy: str
    temp: int
    flops: float
    error: float


def llama(policy: str, *, layers: int, width: int, attention: Any, **options: Any) -> LlamaConfig:
    """Return the configuration of a small Llama with four heads, on one device."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        attn_mechanism=attention,
        gradient_checkpointing=policy,
        gradient_checkpointing_targets=TARGETS if policy in BY_NAME else None,
        **options,
    )


def compiled_gradient(config: LlamaConfig, batch: int, sequence: int) -> tuple[Any, Any]:
    """Return the compiled gradient of the loss, `f(params, input_ids)`, and its parameters."""
    model = LlamaForCausalLM.create(config, seed=0)
    graphdef, params, other = model.split_module()

    def loss(params: Any, input_ids: jax.Array) -> jax.Array:
        return model.merge_module(graphdef, params, other).compute_loss(input_ids)[0].loss

    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return jax.jit(jax.grad(loss)).lower(params, ids).compile(), params


def table(
    *, layers: int, width: int, batch: int, sequence: int, attention: str = "vanilla"
) -> list[Row]:
    """Return a row for each policy; the first row has no policy."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (batch, sequence), dtype=np.int32)
    rows: list[Row] = []
    expected: list[Any] = []
    for policy in ["", *FIXED, *BY_NAME]:
        config = llama(policy, layers=layers, width=width, attention=attention)
        program, params = compiled_gradient(config, batch, sequence)
        grads = [np.asarray(leaf) for leaf in jax.tree.leaves(program(params, ids))]
        expected = expected or grads
        error = max(
            np.abs(a - b).max() / np.abs(b).max() for a, b in zip(grads, expected, strict=True)
        )
        memory, flops = program.memory_analysis(), program.cost_analysis()["flops"]
        rows.append(Row(policy, memory.temp_size_in_bytes, flops, float(error)))
    return rows


def show(rows: list[Row]) -> str:
    none = rows[0]
    lines = [f"{'policy':36} {'temp MB':>8} {'ratio':>6} {'flops/layer':>12} {'gradient':>9}"]
    for row in rows:
        ratio = f"{row.temp / none.temp:.2f}"
        lines.append(
            f"{row.policy or '(none)':36} {row.temp / 1e6:8.1f} {ratio:>6} "
            f"{row.flops / none.flops:12.2f} {row.error:9.0e}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = command_line("remat", __doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="hidden size")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--attention", default="vanilla", help="attn_mechanism")
    print(show(table(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
