"""Compare embeddings of texts of mixed lengths: fastembed, sentence-transformers, and our engine.

uv run --with fastembed --with onnxruntime --with onnx --with onnxscript \
    --with sentence-transformers python -m tools.bench.embed_texts
uv run python -m tools.bench.embed_texts --contenders ours

All contenders load one checkpoint with random weights and the same tokenizer, and receive the same
texts: pieces of the documentation of Python's language, whose numbers of words have a log-normal
distribution. Each run includes the tokenization. The vectors are the normalized means of the
tokens, which are compared first. Our engine groups texts of similar lengths within a budget of
tokens; the others sort or pad as they do by default, in batches of `--batch`.

Runs are interleaved. A row contains the median of the texts and tokens per second, and the ratio to
the fastest other contender (above 1 = faster than all others).
"""

from __future__ import annotations

import pydoc_data.topics
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.encode import SHAPES, VOCAB, exported, save_random
from tools.bench.measure import Run, all_turns, command_line, cores, machine, table

#: Maximum number of tokens of a text.
LONGEST = 512

Embed = Callable[[list[str]], np.ndarray]


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


def ours(directory: Path, batch: int, *, quantized: str | None = None) -> Embed:
    """Return the embedding function of this project's engine."""
    from ed_esurge import eSurge
    from ed_models import AutoEasyDeLModelForEmbedding
    from transformers import AutoTokenizer

    model: Any = AutoEasyDeLModelForEmbedding.from_pretrained(
        directory,
        config_kwargs={"scan_layers": False, "easy_method": "serve"},
        dtype="float32",
        param_dtype="float32",
    )
    if quantized is not None:
        model = model.quantize([("layers", {"dtype": quantized})])
    engine = eSurge(
        model,
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


CONTENDERS: dict[str, Callable[[Path, int], Embed]] = {
    "sentence-transformers": sentence_transformers,
    "fastembed": fastembed,
    "ours": ours,
    "ours int8": partial(ours, quantized="w8a8"),
}


def measure(made: dict[str, Embed], texts: list[str], tokens: int, rounds: int) -> None:
    """Compare the vectors of a few texts, time all texts, and print a table."""
    few = {key: embed(texts[:8]) for key, embed in made.items()}
    first = next(iter(few))
    apart = [f"{key} {np.abs(x - few[first]).max():.1e}" for key, x in few.items()]
    print(f"largest difference from {first}: {', '.join(apart[1:]) or 'no other'}\n")
    runs: dict[str, Run] = {key: partial(embed, texts) for key, embed in made.items()}
    seconds = {k: statistics.median(v) for k, v in all_turns(runs, rounds=rounds).items()}
    rows: list[list[str]] = []
    for key, passed in seconds.items():
        rivals = [other for name, other in seconds.items() if name != key]
        ratio = f"{min(rivals) / passed:.2f}" if rivals else "-"
        rows.append([key, f"{len(texts) / passed:.1f}", f"{tokens / passed:.0f}", ratio])
    print(table(["", "texts/s", "tokens/s", "ratio"], rows))


def main() -> None:
    parser = command_line("embed_texts", __doc__)
    add = parser.add_argument
    add("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--texts", type=int, default=128)
    add("--words", type=float, default=40, help="median of the numbers of words")
    add("--spread", type=float, default=1.0, help="standard deviation of their logarithms")
    add("--batch", type=int, default=32)
    add("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            save_random(directory, shape)
            save_tokenizer(directory)
            np.save(directory / "dim.npy", SHAPES[shape]["hidden_size"])
            texts = texts_of(options.texts, options.words, options.spread)
            tokens = number_of_tokens(directory, texts)
            print(f"\n{shape}: {len(texts)} texts, {tokens} tokens")
            made = {k: CONTENDERS[k](directory, options.batch) for k in options.contenders}
            measure(made, texts, tokens, options.rounds)


def number_of_tokens(directory: Path, texts: list[str]) -> int:
    """Return the number of tokens of all texts, without padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
    return sum(len(row) for row in ids)


if __name__ == "__main__":
    main()
