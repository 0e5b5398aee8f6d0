"""Compare embeddings of an encoder: rows of one length, and texts of mixed lengths.

uv run --with onnxruntime --with onnx --with onnxscript python -m tools.bench.embeddings rows
uv run --with fastembed --with onnxruntime --with onnx --with onnxscript \\
    --with sentence-transformers python -m tools.bench.embeddings texts
uv run python -m tools.bench.embeddings rows --contenders torch ours          without ONNX Runtime
uv run ... python -m tools.bench.embeddings rows --shape minilm --batch 1 8 32 --length 16 128 512

All contenders load one checkpoint with random weights, and the vectors are compared first. Runs are
interleaved. ONNX Runtime runs the graph after its optimizer for transformers, with the threads of
this process. Our int8 is `w8a8`.

`rows` compares the mean of the tokens of torch, ONNX Runtime and this project; int8 of ONNX Runtime
is its dynamic quantization. A run repeats short calls for a tenth of a second. A cell contains the
median in milliseconds and the ratio to the best other contender of the same number format (float32
or int8); above 1 = faster than all others.

`texts` compares fastembed, sentence-transformers and our engine on the same texts: pieces of the
documentation of Python's language, whose numbers of words have a log-normal distribution. Each run
includes the tokenization. The vectors are normalized means of the tokens. Our engine groups texts
of similar lengths within a budget of tokens; the others sort or pad as they do by default, in
batches of `--batch`. A row contains the median of the texts and tokens per second, and the ratio to
the fastest other contender.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import Run, all_turns, command_line, cores, machine, settled, table

#: Maximum number of tokens of a text.
LONGEST = 512
Embed = Callable[[list[str]], np.ndarray]
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


def save_random(directory: Path, shape: str) -> None:
    """Write a checkpoint of the shape with random weights."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    fields: dict[str, Any] = SHAPES[shape]
    config = BertConfig(vocab_size=VOCAB, **fields)
    BertModel(config, add_pooling_layer=False).save_pretrained(directory)


def load_model(directory: Path, quantized: str | None) -> Any:
    """Return this project's model; `quantized` is the format of the matrices of its layers."""
    from ed_models import AutoEasyDeLModelForEmbedding

    model: Any = AutoEasyDeLModelForEmbedding.from_pretrained(
        directory,
        config_kwargs={"scan_layers": False, "easy_method": "serve"},
        dtype="float32",
        param_dtype="float32",
    )
    return model if quantized is None else model.quantize([("layers", {"dtype": quantized})])


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
        from flax import nnx

        # The engine packs the matrices of an encoder in the same way.
        graphdef, self.state = nnx.split(pack(load_model(directory, quantized)))
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


def texts_of(count: int, median: float, spread: float) -> list[str]:
    """Return texts of the documentation, of 3 to 350 words.

    Args:
        median: median of the numbers of words.
        spread: standard deviation of their logarithms.
    """
    words = " ".join(pydoc_data.topics.topics.values()).split()
    rng = np.random.default_rng(0)
    sizes = np.clip(np.exp(rng.normal(np.log(median), spread, count)), 3, 350).astype(int)
    starts = rng.integers(0, len(words) - 350, count)
    return [" ".join(words[s : s + n]) for s, n in zip(starts, sizes, strict=True)]


def save_tokenizer(directory: Path) -> None:
    """Train a WordPiece tokenizer on the documentation, and write it next to the model."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import PreTrainedTokenizerFast

    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(pydoc_data.topics.topics.values(), vocab_size=VOCAB)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        model_max_length=LONGEST,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
    )
    tokenizer.save_pretrained(directory)


def sentence_transformers(directory: Path, batch: int) -> Embed:
    """Return the embedding function of sentence-transformers on torch, float32."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    inner = Transformer(str(directory), max_seq_length=LONGEST)
    pooling = Pooling(inner.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[inner, pooling, Normalize()], device="cpu")
    return lambda texts: model.encode(texts, batch_size=batch, show_progress_bar=False)


def fastembed(directory: Path, batch: int) -> Embed:
    """Return the embedding function of fastembed on ONNX Runtime, float32."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    exported(directory)
    name = f"local/{directory.name}"
    TextEmbedding.add_custom_model(
        name,
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf=name),
        dim=int(np.load(directory / "dim.npy")),
        model_file="model.onnx",
    )
    model = TextEmbedding(name, specific_model_path=str(directory), threads=cores())
    return lambda texts: np.stack(list(model.embed(texts, batch_size=batch)))


def our_engine(directory: Path, batch: int, *, quantized: str | None = None) -> Embed:
    """Return the embedding function of this project's engine."""
    from ed_esurge import eSurge
    from transformers import AutoTokenizer

    engine = eSurge(
        load_model(directory, quantized),
        AutoTokenizer.from_pretrained(directory),
        max_num_seqs=batch,
        max_model_len=LONGEST,
        silent_mode=True,
    )

    def embed(texts: list[str]) -> np.ndarray:
        return np.stack(
            [np.asarray(output.pooled) for output in engine.embed(texts, use_tqdm=False)]
        )

    return embed


ROWS = {
    "torch": Torch,
    "onnxruntime": OnnxRuntime,
    "ours": Ours,
    "onnxruntime int8": partial(OnnxRuntime, int8=True),
    "ours int8": partial(Ours, quantized="w8a8"),
}
TEXTS: dict[str, Callable[[Path, int], Embed]] = {
    "sentence-transformers": sentence_transformers,
    "fastembed": fastembed,
    "ours": our_engine,
    "ours int8": partial(our_engine, quantized="w8a8"),
}


def print_differences(vectors: dict[str, np.ndarray]) -> None:
    """Print the largest difference of the vectors of each contender from those of the first."""
    first, *others = vectors
    apart = [f"{key} {np.abs(vectors[key] - vectors[first]).max():.1e}" for key in others]
    print(f"largest difference from {first}: {', '.join(apart) or 'no other'}\n")


def measure_rows(
    shape: str, made: dict[str, Any], batches: list[int], lengths: list[int], rounds: int
) -> None:
    """Compare the vectors, time all batches and lengths, and print a table."""
    rng = np.random.default_rng(0)
    few = rng.integers(1000, VOCAB, (2, 16))
    print(f"\n{shape}")
    print_differences({key: of(few) for key, of in made.items()})
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


def measure_texts(made: dict[str, Embed], texts: list[str], tokens: int, rounds: int) -> None:
    """Compare the vectors of a few texts, time all texts, and print a table."""
    print_differences({key: embed(texts[:8]) for key, embed in made.items()})
    runs: dict[str, Run] = {key: partial(embed, texts) for key, embed in made.items()}
    seconds = {k: statistics.median(v) for k, v in all_turns(runs, rounds=rounds).items()}
    rows: list[list[str]] = []
    for key, passed in seconds.items():
        rivals = [other for name, other in seconds.items() if name != key]
        ratio = f"{min(rivals) / passed:.2f}" if rivals else "-"
        rows.append([key, f"{len(texts) / passed:.1f}", f"{tokens / passed:.0f}", ratio])
    print(table(["", "texts/s", "tokens/s", "ratio"], rows))


def count_tokens(directory: Path, texts: list[str]) -> int:
    """Return the number of tokens of all texts, without padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
    return sum(len(row) for row in ids)


def main() -> None:
    parser = command_line("embeddings", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, contenders, rounds in (("rows", ROWS, 5), ("texts", TEXTS, 3)):
        add = kinds.add_parser(kind).add_argument
        add("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
        add("--contenders", nargs="+", choices=list(contenders), default=list(contenders))
        add("--rounds", type=int, default=rounds)
        if kind == "rows":
            add("--batch", type=int, nargs="+", default=[1, 8, 32])
            add("--length", type=int, nargs="+", default=[16, 128, 512])
        else:
            add("--batch", type=int, default=32)
            add("--texts", type=int, default=128)
            add("--words", type=float, default=40, help="median of the numbers of words")
            add("--spread", type=float, default=1.0, help="standard deviation of their logarithms")
    options = parser.parse_args()
    print(machine())
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as name:
            save_random(Path(name), shape)
            if options.kind == "rows":
                made = {key: ROWS[key](Path(name)) for key in options.contenders}
                measure_rows(shape, made, options.batch, options.length, options.rounds)
            else:
                compare_texts(Path(name), shape, options)


def compare_texts(directory: Path, shape: str, options: argparse.Namespace) -> None:
    """Create the texts and the contenders, and print a table."""
    save_tokenizer(directory)
    np.save(directory / "dim.npy", SHAPES[shape]["hidden_size"])
    texts = texts_of(options.texts, options.words, options.spread)
    tokens = count_tokens(directory, texts)
    print(f"\n{shape}: {len(texts)} texts, {tokens} tokens")
    made = {key: TEXTS[key](directory, options.batch) for key in options.contenders}
    measure_texts(made, texts, tokens, options.rounds)


if __name__ == "__main__":
    main()
