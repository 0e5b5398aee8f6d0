"""Measure training memory against the sequence length: blocks and chunks against full scores.

    python -m tools.bench.memory
    python -m tools.bench.memory --lengths 2048 4096 --layers 8

The gradient of a small Llama's loss is compiled for each length and not executed. The figure is the
memory of the compiled program for intermediate results (`memory_analysis`).

- blockwise: attn_mechanism="blockwise" with use_scan_mlp, gradient_checkpointing="nothing_saveable"
- vanilla: full scores and whole MLP, with the same gradient_checkpointing
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

from tools.bench.measure import command_line

LENGTHS = (2048, 4096, 8192, 16384, 32768)
#: Options by column name.
VARIANTS: dict[str, dict[str, Any]] = {
    "blockwise": {"attn_mechanism": "blockwise", "use_scan_mlp": True, "scan_mlp_chunk_size": 1024},
    "vanilla": {"attn_mechanism": "vanilla"},
}


@dataclass(frozen=True)
class Point:
    """Bytes of intermediate results at one length."""

    length: int
    blockwise: int
    vanilla: int


def temp_bytes(length: int, *, layers: int, width: int, batch: int = 1, **options: Any) -> int:
    """Return the temporary memory of the compiled gradient of a Llama's loss, in bytes.

    Args:
        length: Number of tokens per row.
        layers, width: Depth and hidden size; four heads, an MLP of four times the width.
        batch: Number of rows.
        options: Fields of the configuration.
    """
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=length,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        gradient_checkpointing="nothing_saveable",
        **options,
    )
    model = nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def loss(state: Any, input_ids: jax.Array, segment_ids: jax.Array) -> Any:
        return nnx.merge(graphdef, state).compute_loss(input_ids, segment_ids=segment_ids)[0].loss

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    program = jax.jit(jax.grad(loss)).lower(state, tokens, tokens).compile()
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes


def measure(lengths: tuple[int, ...] = LENGTHS, *, layers: int = 2, width: int = 64) -> list[Point]:
    """Return a point for each length."""

    def of(variant: str, length: int) -> int:
        return temp_bytes(length, layers=layers, width=width, **VARIANTS[variant])

    return [Point(n, of("blockwise", n), of("vanilla", n)) for n in lengths]


def show(points: list[Point]) -> str:
    """Return the points as a table; constant bytes per token mean memory linear in the length."""
    lines = [f"{'tokens':>7} {'blockwise MB':>13} {'kB/token':>9} {'vanilla MB':>11} {'ratio':>7}"]
    for point in points:
        per_token = point.blockwise / point.length / 1e3
        lines.append(
            f"{point.length:7} {point.blockwise / 1e6:13.1f} {per_token:9.2f} "
            f"{point.vanilla / 1e6:11.1f} {point.vanilla / point.blockwise:7.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = command_line("memory", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="hidden size")
    given = parser.parse_args()
    print(show(measure(tuple(given.lengths), layers=given.layers, width=given.width)))


if __name__ == "__main__":
    main()
