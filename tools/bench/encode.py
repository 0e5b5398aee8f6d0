"""Compare the embeddings of an encoder with torch and ONNX Runtime, in one run.

uv run --with onnxruntime --with onnx --with onnxscript python -m tools.bench.encode
uv run python -m tools.bench.encode --contenders torch ours          without ONNX Runtime
uv run ... python -m tools.bench.encode --shape minilm --batch 1 8 32 --length 16 128 512

All contenders load one checkpoint with random weights, and the mean of the tokens is compared
first. ONNX Runtime runs the graph after its optimizer for transformers, with the threads of this
process; int8 is its dynamic quantization. Our int8 is `w8a8`.

Runs are interleaved; a run repeats short calls for a tenth of a second. A cell contains the median
in milliseconds and the ratio to the best other contender of the same number format (float32 or
int8); above 1 = faster than all others.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import Run, all_turns, command_line, cores, machine, settled, table

#: Shapes: google-bert/bert-base-uncased and sentence-transformers/all-MiniLM-L6-v2.
SHAPES: dict[str, dict[str, int]] = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "minilm": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
}
VOCAB = 30522


class Torch:
    """`transformers` on torch, float32."""

    def __init__(self, directory: Path):
        import torch
        from transformers import BertModel

        self.torch = torch
        self.model = BertModel.from_pretrained(directory, add_pooling_layer=False).eval()

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the mean of the tokens of each row."""
        with self.torch.inference_mode():
            hidden = self.model(self.torch.from_numpy(ids)).last_hidden_state
            return hidden.mean(dim=1).numpy()


class Ours:
    """This project: the embedding task, jitted; `quantized` is the format of every matrix."""

    def __init__(self, directory: Path, quantized: str | None = None):
        import jax
        from ed_layers.packing import pack
        from ed_models import AutoEasyDeLModelForEmbedding
        from flax import nnx

        model: Any = AutoEasyDeLModelForEmbedding.from_pretrained(
            directory,
            config_kwargs={"scan_layers": False, "easy_method": "serve"},
            dtype="float32",
            param_dtype="float32",
        )
        if quantized is not None:
            model = model.quantize([("layers", {"dtype": quantized})])
        # The engine packs the matrices of an encoder in the same way.
        graphdef, self.state = nnx.split(pack(model))
        self.run = jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids).embeddings)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the embedding of each row."""
        return np.asarray(self.run(self.state, ids.astype(np.int32)))


class OnnxRuntime:
    """ONNX Runtime on the optimized graph, in float32 or dynamically quantized to int8."""

    def __init__(self, directory: Path, *, int8: bool = False):
        import onnxruntime

        path = exported(directory)
        if int8:
            from onnx import TensorProto
            from onnxruntime.quantization import QuantType, quantize_dynamic

            small = directory / "int8.onnx"
            quantize_dynamic(
                path,
                small,
                weight_type=QuantType.QInt8,
                per_channel=True,
                extra_options={"DefaultTensorType": TensorProto.FLOAT},
            )
            path = small
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = cores()
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the mean of the tokens of each row."""
        names = {i.name for i in self.session.get_inputs()}
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        (hidden,) = self.session.run(None, {n: x for n, x in given.items() if n in names})
        return hidden.mean(axis=1)


def exported(directory: Path) -> Path:
    """Return the optimized ONNX graph of the checkpoint, which is written once."""
    import torch
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import BertModel

    path = directory / "model.onnx"
    if path.exists():
        return path
    model = BertModel.from_pretrained(
        directory, add_pooling_layer=False, attn_implementation="eager"
    ).eval()

    class Hidden(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return model(input_ids, attention_mask=attention_mask).last_hidden_state

    model.requires_grad_(False)
    ids = torch.ones((2, 8), dtype=torch.long)
    axes = {0: "batch", 1: "length"}
    raw = directory / "raw.onnx"
    torch.onnx.export(
        Hidden(),
        (ids, ids),
        str(raw),
        input_names=["input_ids", "attention_mask"],
        output_names=["hidden"],
        dynamic_axes={"input_ids": axes, "attention_mask": axes, "hidden": axes},
        dynamo=False,
    )
    config = model.config
    optimized = optimize_model(
        str(raw), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
    )
    optimized.save_model_to_file(str(path))
    return path


CONTENDERS = {
    "torch": Torch,
    "onnxruntime": OnnxRuntime,
    "ours": Ours,
    "onnxruntime int8": partial(OnnxRuntime, int8=True),
    "ours int8": partial(Ours, quantized="w8a8"),
}


def save_random(directory: Path, shape: str) -> None:
    """Write a checkpoint of the shape with random weights."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    fields: dict[str, Any] = SHAPES[shape]
    config = BertConfig(vocab_size=VOCAB, **fields)
    BertModel(config, add_pooling_layer=False).save_pretrained(directory)


def main() -> None:
    parser = command_line("encode", __doc__)
    add = parser.add_argument
    add("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--length", type=int, nargs="+", default=[16, 128, 512])
    add("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as name:
            save_random(Path(name), shape)
            made = {key: CONTENDERS[key](Path(name)) for key in options.contenders}
            measure(shape, made, options.batch, options.length, options.rounds)


def measure(
    shape: str, made: dict[str, Any], batches: list[int], lengths: list[int], rounds: int
) -> None:
    """Compare the vectors, time all batches and lengths, and print a table."""
    rng = np.random.default_rng(0)
    few = rng.integers(1000, VOCAB, (2, 16))
    vectors = {key: of(few) for key, of in made.items()}
    first = next(iter(vectors))
    apart = [f"{key} {np.abs(x - vectors[first]).max():.1e}" for key, x in vectors.items()]
    print(f"\n{shape}; largest difference from {first}: {', '.join(apart[1:])}\n")
    rows: dict[str, list[str]] = {key: [key] for key in made}
    header = ["ms (ratio)"]
    for batch in batches:
        for length in lengths:
            ids = rng.integers(1000, VOCAB, (batch, length))
            runs: dict[str, Run] = {key: settled(partial(of, ids)) for key, of in made.items()}
            turns = all_turns(runs, rounds=rounds)
            medians = {key: statistics.median(seconds) for key, seconds in turns.items()}
            header.append(f"{batch} x {length}")
            for key, seconds in medians.items():
                rivals = [
                    other
                    for name, other in medians.items()
                    if name != key and ("int8" in name) == ("int8" in key)
                ]
                ratio = f" ({min(rivals) / seconds:.2f})" if rivals else ""
                rows[key].append(f"{seconds * 1e3:.1f}{ratio}")
            print(header[-1], *(row[-1] for row in rows.values()), file=sys.stderr, flush=True)
    print(table(header, [*rows.values()]))


if __name__ == "__main__":
    main()
