"""Measure the memory of fine-tuning: all weights, adapters, and adapters on quantized weights.

    python -m tools.bench.finetuning
    python -m tools.bench.finetuning --layers 8 --rows 4 --length 512

A train step (AdamW, float32, SmolLM2-135M's shape, every layer rematerialized) is compiled for each
case and not executed. Its memory consists of the weights, the optimizer state, and the compiled
program's memory for intermediate results (`memory_analysis`), including gradients.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
from ed_infra.specs import LoraSpec
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.arguments import SFTArguments
from ed_trainers.methods.sft import SFTTrainer
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.state import EasyDeLState
from ed_trainers.step import build_train_step

from tools.bench.decode import SHAPES, VOCAB
from tools.bench.measure import command_line, machine, table

#: Row -> (format of the weights, whether only adapters are trained).
KINDS: dict[str, tuple[str | None, bool]] = {
    "all weights": (None, False),
    "adapters": (None, True),
    "adapters on int8": ("int8", True),
    "adapters on nf4": ("nf4", True),
}
MEGABYTE = 2**20


def model_of(kind: str, layers: int, rank: int) -> Any:
    """Return the model of a row, with random weights."""
    fields = {**SHAPES["llama"], "num_hidden_layers": layers, "vocab_size": VOCAB}
    config = LlamaConfig(
        **fields,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        gradient_checkpointing="nothing_saveable",
        use_scan_mlp=True,
        attn_mechanism="blockwise",
    )
    model: Any = LlamaForCausalLM.create(config, seed=0)
    method, adapted = KINDS[kind]
    if method is not None:
        model = model.quantize({"dtype": method})
    return model.apply_lora(LoraSpec(rank=rank)) if adapted else model


def bytes_of(tree: object) -> int:
    """Return the number of bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def measure(kind: str, args: argparse.Namespace) -> list[str]:
    """Return a row: trained parameters, megabytes of weights, optimizer, temporaries and total."""
    arguments = SFTArguments(total_batch_size=args.rows, max_training_steps=1)
    trainer = SFTTrainer(arguments, model_of(kind, args.layers, args.rank))
    schedule = build_schedule(arguments, 1)
    state = EasyDeLState.create(model=trainer.model)
    state = state.init_tx(build_optimizer(arguments, schedule))
    step = build_train_step(state, trainer.method, schedule, rows=args.rows, seed=0)
    ids = np.zeros((args.rows, args.length), np.int32)
    batch: Any = jax.tree.map(lambda x: x[None], trainer.prepare({"input_ids": ids}))
    memory: Any = step.lower(tuple(jax.tree.leaves(state)), batch).compile().memory_analysis()
    weights, optimizer = bytes_of((state.graphstate, state.graphother)), bytes_of(state.opt_state)
    learned = sum(leaf.size for leaf in jax.tree.leaves(state.graphstate))
    parts = [weights, optimizer, memory.temp_size_in_bytes]
    return [kind, f"{learned:,}", *(f"{n / MEGABYTE:.0f}" for n in (*parts, sum(parts)))]


def main() -> None:
    parser = command_line("finetuning", __doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    header = ["trained", "trained parameters", "weights, MB", "optimizer", "temporary", "total"]
    print(machine())
    print(f"{args.layers} layers, rank {args.rank}, {args.rows} rows of {args.length} tokens")
    print(table(header, [measure(kind, args) for kind in KINDS]))


if __name__ == "__main__":
    main()
