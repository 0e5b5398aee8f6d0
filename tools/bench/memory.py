"""Measure the memory of training from compiled programs, which mostly are not executed.

    python -m tools.bench.memory lengths         blocks and chunks against full scores, by length
    python -m tools.bench.memory policies        each `gradient_checkpointing` policy
    python -m tools.bench.memory finetuning      all weights, and adapters
    python -m tools.bench.memory policies --length 2048 --attention blockwise

Temporary memory is the compiled program's memory for intermediate results (`memory_analysis`).

`lengths` compiles the gradient of a small Llama's loss for each length, with
gradient_checkpointing="nothing_saveable". `blockwise` is attn_mechanism="blockwise" with
use_scan_mlp; `vanilla` has full scores and the whole MLP.

`policies` compiles the gradient of a small Llama of scanned layers. `flops` are forward and
backward; `cost_analysis` counts the body of a loop once, so they are per layer, and their ratio
shows the recomputed share. `gradient` is the largest difference to no policy, relative to each
parameter's largest gradient.

`finetuning` compiles a train step of SmolLM2-135M's shape (AdamW, float32, every layer
rematerialized). The memory consists of weights, optimizer state and temporary memory, which
includes the gradients.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.specs import LoraSpec
from ed_layers.depth.remat import BY_NAME, FIXED
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.arguments import SFTArguments
from ed_trainers.methods.sft import SFTTrainer
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.state import EasyDeLState
from ed_trainers.step import build_train_step

from tools.bench.decode import SHAPES, VOCAB
from tools.bench.measure import command_line, machine, table

LENGTHS = (2048, 4096, 8192, 16384, 32768)
#: Column -> options of the configuration.
VARIANTS: dict[str, dict[str, Any]] = {
    "blockwise": {"attn_mechanism": "blockwise", "use_scan_mlp": True, "scan_mlp_chunk_size": 1024},
    "vanilla": {"attn_mechanism": "vanilla"},
}
TARGETS = ("attn_output", "mlp_gate")
#: Row -> (format of the weights, whether only adapters are trained).
KINDS: dict[str, tuple[str | None, bool]] = {
    "all weights": (None, False),
    "adapters": (None, True),
    "adapters on int8": ("int8", True),
    "adapters on nf4": ("nf4", True),
}
ONE = (1, 1, 1, 1, 1)


@dataclass(frozen=True)
class Point:
    """Bytes of intermediate results at one length."""

    length: int
    blockwise: int
    vanilla: int


@dataclass(frozen=True)
class Row:
    """Results of one policy: bytes, flops of a layer (forward and backward), gradient error."""

    policy: str
    temp: int
    flops: float
    error: float


def small_llama(*, words: int, layers: int, width: int, length: int, **options: Any) -> LlamaConfig:
    """Return the configuration of a small Llama with four heads, on one device."""
    return LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=length,
        sharding_axis_dims=ONE,
        **options,
    )


def compile_gradient(model: Any, batch: int, length: int, *, segments: bool) -> tuple[Any, Any]:
    """Return the compiled gradient of the loss, and the parameters.

    The program is a function of the parameters, the tokens and, with `segments`, their segments.
    """
    graphdef, params, other = model.split_module()

    def loss(params: Any, input_ids: jax.Array, *segment_ids: jax.Array) -> jax.Array:
        merged = model.merge_module(graphdef, params, other)
        given = dict(zip(["segment_ids"], segment_ids, strict=False))
        return merged.compute_loss(input_ids, **given)[0].loss

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    arrays = [tokens] * (1 + segments)
    return jax.jit(jax.grad(loss)).lower(params, *arrays).compile(), params


def measure_lengths(
    lengths: tuple[int, ...] = LENGTHS, *, layers: int = 2, width: int = 64
) -> list[Point]:
    """Return a point for each length."""

    def measure_variant(variant: str, length: int) -> int:
        config = small_llama(
            words=512,
            layers=layers,
            width=width,
            length=length,
            gradient_checkpointing="nothing_saveable",
            **VARIANTS[variant],
        )
        model = LlamaForCausalLM.create(config, seed=0)
        program, _ = compile_gradient(model, 1, length, segments=True)
        return program.memory_analysis().temp_size_in_bytes

    return [Point(n, *(measure_variant(name, n) for name in VARIANTS)) for n in lengths]


def show_lengths(points: list[Point]) -> str:
    """Return the points as a table; constant bytes per token mean memory linear in the length."""
    rows = [
        [
            str(point.length),
            f"{point.blockwise / 1e6:.1f}",
            f"{point.blockwise / point.length / 1e3:.2f}",
            f"{point.vanilla / 1e6:.1f}",
            f"{point.vanilla / point.blockwise:.1f}",
        ]
        for point in points
    ]
    return table(["tokens", "blockwise MB", "kB/token", "vanilla MB", "ratio"], rows)


def measure_policies(
    *, layers: int, width: int, batch: int, length: int, attention: Any = "vanilla"
) -> list[Row]:
    """Return a row for each policy; the first row has no policy."""
    ids = np.random.default_rng(0).integers(0, 256, (batch, length), dtype=np.int32)
    rows: list[Row] = []
    expected: list[Any] = []
    for policy in ["", *FIXED, *BY_NAME]:
        config = small_llama(
            words=256,
            layers=layers,
            width=width,
            length=length,
            attn_mechanism=attention,
            gradient_checkpointing=policy,
            gradient_checkpointing_targets=TARGETS if policy in BY_NAME else None,
        )
        model = LlamaForCausalLM.create(config, seed=0)
        program, params = compile_gradient(model, batch, length, segments=False)
        grads = [np.asarray(leaf) for leaf in jax.tree.leaves(program(params, ids))]
        expected = expected or grads
        error = max(
            np.abs(a - b).max() / np.abs(b).max() for a, b in zip(grads, expected, strict=True)
        )
        memory, flops = program.memory_analysis(), program.cost_analysis()["flops"]
        rows.append(Row(policy, memory.temp_size_in_bytes, flops, float(error)))
    return rows


def show_policies(rows: list[Row]) -> str:
    """Return the policies as a table, relative to no policy."""
    none = rows[0]
    cells = [
        [
            row.policy or "(none)",
            f"{row.temp / 1e6:.1f}",
            f"{row.temp / none.temp:.2f}",
            f"{row.flops / none.flops:.2f}",
            f"{row.error:.0e}",
        ]
        for row in rows
    ]
    return table(["policy", "temporary MB", "ratio", "flops of a layer", "gradient"], cells)


def create_trained_model(kind: str, layers: int, rank: int) -> Any:
    """Return the model of a row of `KINDS`, with random weights."""
    config = LlamaConfig(
        **{**SHAPES["llama"], "num_hidden_layers": layers, "vocab_size": VOCAB},
        sharding_axis_dims=ONE,
        gradient_checkpointing="nothing_saveable",
        use_scan_mlp=True,
        attn_mechanism="blockwise",
    )
    model: Any = LlamaForCausalLM.create(config, seed=0)
    method, adapted = KINDS[kind]
    if method is not None:
        model = model.quantize({"dtype": method})
    return model.apply_lora(LoraSpec(rank=rank)) if adapted else model


def measure_finetuning(kind: str, *, layers: int, rank: int, batch: int, length: int) -> list[str]:
    """Return a row: trained parameters, megabytes of weights, optimizer, temporaries and total."""
    arguments = SFTArguments(total_batch_size=batch, max_training_steps=1)
    trainer = SFTTrainer(arguments, create_trained_model(kind, layers, rank))
    schedule = build_schedule(arguments, 1)
    state = EasyDeLState.create(model=trainer.model)
    state = state.init_tx(build_optimizer(arguments, schedule))
    step = build_train_step(state, trainer.method, schedule, rows=batch, seed=0)
    ids = np.zeros((batch, length), np.int32)
    arrays: Any = jax.tree.map(lambda x: x[None], trainer.prepare({"input_ids": ids}))
    memory: Any = step.lower(tuple(jax.tree.leaves(state)), arrays).compile().memory_analysis()
    weights, optimizer = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for tree in ((state.graphstate, state.graphother), state.opt_state)
    )
    learned = sum(leaf.size for leaf in jax.tree.leaves(state.graphstate))
    parts = [weights, optimizer, memory.temp_size_in_bytes]
    return [kind, f"{learned:,}", *(f"{n / 2**20:.0f}" for n in (*parts, sum(parts)))]


def main() -> None:
    parser: argparse.ArgumentParser = command_line("memory", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, layers, batch, length in (
        ("lengths", 2, 1, None),
        ("policies", 8, 2, 512),
        ("finetuning", 30, 2, 256),
    ):
        kind = kinds.add_parser(name)
        kind.add_argument("--layers", type=int, default=layers)
        if name == "lengths":
            kind.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
        else:
            kind.add_argument("--batch", type=int, default=batch)
            kind.add_argument("--length", type=int, default=length)
        if name == "finetuning":
            kind.add_argument("--rank", type=int, default=16)
        else:
            kind.add_argument("--width", type=int, default=64, help="hidden size")
        if name == "policies":
            kind.add_argument("--attention", default="vanilla", help="attn_mechanism")
    options = vars(parser.parse_args())
    print(machine())
    chosen = options.pop("kind")
    if chosen == "lengths":
        print(show_lengths(measure_lengths(tuple(options.pop("lengths")), **options)))
    elif chosen == "policies":
        print(show_policies(measure_policies(**options)))
    else:
        header = ["trained", "trained parameters", "weights, MB", "optimizer", "temporary", "total"]
        print(table(header, [measure_finetuning(kind, **options) for kind in KINDS]))


if __name__ == "__main__":
    main()
