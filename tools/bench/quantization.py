"""Measure quantized weights: memory, files, errors, held-out loss, and the time of a step.

    python -m tools.bench.quantization              the model of pretrain.yaml, and a wider one
    python -m tools.bench.quantization --methods nf4 int8 --layers 8 --rounds 9

Bytes per weight include the scales of the quantized matrices, in live arrays and in files. The loss
is computed on the held-out texts of the run; the error of the logits is relative. A decode step is
timed on a model of SmolLM2-135M's shape with random weights and a quantized head; runs are
interleaved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_layers.quantization.model import quantized_matrices
from flax import nnx

from tools.bench.decode import SHAPES, VOCAB, Ours
from tools.bench.measure import command_line, machine, table, take_turns

#: Row -> fields of the configuration; None: not quantized.
METHODS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "int8": {"dtype": "int8"},
    "int8, groups of 64": {"dtype": "int8", "group_size": 64},
    "w8a8 (a8q)": {"dtype": "w8a8"},
    "fp8": {"dtype": "fp8"},
    "mxfp8": {"dtype": "mxfp8"},
    "nf4": {"dtype": "nf4"},
    "nf4, double": {"dtype": "nf4", "double_quantization": True},
    "int4": {"dtype": "int4"},
    "w4a8 (a4q)": {"dtype": "w4a8"},
    "mxfp4": {"dtype": "mxfp4"},
}
#: A pattern that matches every matrix, including embedding and head.
EVERYTHING = ""


def held_out(run: Path) -> list[Mapping[str, Any]]:
    """Return the held-out batches of a run."""
    from ed_elarge.model import eLargeModel

    loader = eLargeModel.from_yaml(str(run)).build_eval_dataset()
    assert loader is not None, f"{run} has no held-out texts"
    keys = ("input_ids", "labels", "segment_ids", "position_ids")
    return [{k: jnp.asarray(v) for k, v in b.items() if k in keys} for b in loader]


def loss_and_logits(model: Any, batches: Iterable[Mapping[str, Any]]) -> tuple[float, np.ndarray]:
    """Return the nats per token over all batches, and the logits of the first batch."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def of(state: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        output, count = nnx.merge(graphdef, state).compute_loss(**batch)
        return output.loss * count, count

    @jax.jit
    def logits(state: Any, batch: Mapping[str, Any]) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return nnx.merge(graphdef, state)(**inputs).logits

    batches = list(batches)
    sums = [of(state, batch) for batch in batches]
    total, count = (float(sum(part)) for part in zip(*sums, strict=True))
    return total / count, np.asarray(logits(state, batches[0]))


def quality(directory: Path, run: Path, methods: Iterable[str]) -> str:
    """Return the table of one trained model."""
    from ed_models import AutoEasyDeLModelForCausalLM

    ones = (1, 1, 1, 1, 1)
    plain: Any = AutoEasyDeLModelForCausalLM.from_pretrained(directory, sharding_axis_dims=ones)
    batches = held_out(run)
    before, exact = loss_and_logits(plain, batches)
    weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(plain)))
    rows = []
    for name in methods:
        spec = METHODS[name]
        model = plain if spec is None else plain.quantize([(EVERYTHING, spec)])
        loss, logits = loss_and_logits(model, batches)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            disk = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        memory = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
        error = float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
        matrices = [(w.nbytes, np.prod(w.shape)) for _, w in quantized_matrices(model)]
        of_matrix = sum(n for n, _ in matrices) / sum(s for _, s in matrices) if matrices else 4.0
        cells = (of_matrix, memory / weights, disk / weights)
        rows.append([name, *(f"{cell:.3f}" for cell in cells), f"{error:.4f}", f"{loss:.4f}"])
        print(rows[-1], flush=True)
    header = ["", "bytes a weight", "in memory", "on disk", "error of logits", "held-out loss"]
    return f"{weights} weights; loss before {before:.4f}\n\n" + table(header, rows)


def times(methods: Iterable[str], layers: int, rounds: int, batch: list[int]) -> str:
    """Return the table of decode times of a model whose weights do not fit into caches."""
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    fields = {**SHAPES["llama"], "num_hidden_layers": layers, "vocab_size": VOCAB}
    one = (1, 1, 1, 1, 1)
    plain: Any = LlamaForCausalLM.create(LlamaConfig(**fields, sharding_axis_dims=one), seed=0)
    ours = {}
    for name in methods:
        spec = METHODS[name]
        model = plain if spec is None else plain.quantize([(EVERYTHING, spec)])
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            ours[name] = Ours(Path(folder), 64, "auto")
    rows = {name: [name, f"{of.weight_bytes / 1e6:.0f}"] for name, of in ours.items()}
    for b in batch:
        tokens = np.random.default_rng(0).integers(VOCAB, size=(b, 32))
        runs = {name: of.decoder(tokens) for name, of in ours.items()}
        seconds = take_turns(runs, rounds=rounds)
        for name, taken in seconds.items():
            ratio = f" ({seconds['float32'] / taken:.2f})" if "float32" in seconds else ""
            rows[name].append(f"{taken * 1e3:.1f}{ratio}")
    return table(["", "weights, MB", *(f"batch {b}, ms (speed)" for b in batch)], [*rows.values()])


def main() -> None:
    parser = command_line("quantization", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=Path("runs/pretrain/model"))
    add("--run", type=Path, default=Path("examples/pretrain.yaml"), help="run with held-out texts")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--layers", type=int, default=8, help="layers of the timed model; 0 = no timing")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(machine())
    print(quality(options.model, options.run, options.methods))
    if options.layers:
        print("\n" + times(options.methods, options.layers, options.rounds, options.batch))


if __name__ == "__main__":
    main()
