"""Measure tokens per second from text to the cache and from the cache to batches, and data waits.

    python -m tools.bench.data                        tokenizing and loading, against others
    python -m tools.bench.data --documents 4000 --rounds 1
    python -m tools.bench.data --chats --num-proc 2   chats through a template, also in processes
    python -m tools.bench.data --wait                 pretrain.yaml: share of a step spent waiting

The text is `pydoc_data.topics`, split into paragraphs. A number before each paragraph makes every
document unique. All contenders use the same tokenizer; their runs are interleaved. `datasets` is
`Dataset.map` in batches of 1,000, which writes a cache as this project does. If TRL is installed,
its `pack_dataset` packs the loaded rows. grain reads the texts from memory, also in batches of
1,000, and writes nothing; its rows contain segments and positions, as those of this project do. If
TRL or grain is not installed, a line reports the missing package.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ed_data import Inform, Loader, Mixture, build_loader, train_bpe

from tools.bench.measure import Run, command_line, table, take_turns
from tools.workspace import ROOT

LENGTH, BATCH = 2048, 8
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def missing(package: str) -> str | None:
    """Return a message about a package that is not installed, or None."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed, so it is not measured"
    return None


def paragraphs(count: int) -> list[str]:
    """Return `count` texts, all different."""
    from pydoc_data.topics import topics

    found = [p for text in topics.values() for p in text.split("\n\n") if len(p) > 80]
    return [
        f"{i}. {text}" for i, text in enumerate(itertools.islice(itertools.cycle(found), count))
    ]


@dataclass(frozen=True)
class Corpus:
    """Documents as a file, and the tokenizer that all contenders share.

    Attributes:
        folder: Folder of all written files.
        rows: Rows of `folder / "rows.jsonl"`: texts, or chats of two messages.
        tokenizer: Small byte-level BPE.
        tokens: Number of tokens of all documents, including the end-of-text tokens.
    """

    folder: Path
    rows: list[Any]
    tokenizer: Any
    tokens: int

    @classmethod
    def make(cls, folder: Path, documents: int, *, chats: bool) -> Corpus:
        """Write the rows, and train the tokenizer on some of the rows."""
        texts = paragraphs(documents)
        tokenizer = train_bpe(texts[:2000], 4096)
        tokenizer.chat_template = _TEMPLATE
        rows: list[Any] = texts
        if chats:
            rows = [
                [{"role": "user", "content": t[:60]}, {"role": "assistant", "content": t[60:]}]
                for t in texts
            ]
        lines = (json.dumps({"content": row}) + "\n" for row in rows)
        (folder / "rows.jsonl").write_text("".join(lines))
        corpus = cls(folder, rows, tokenizer, 0)
        made = build_loader(corpus.mixture("count"), tokenizer).stats
        return cls(folder, rows, tokenizer, made["tokens"])

    def mixture(self, cache: str, **options: Any) -> Mixture:
        """Return a mixture of the rows with packing."""
        return Mixture(
            informs=(Inform(data_files=str(self.folder / "rows.jsonl")),),
            cache_dir=str(self.folder / cache),
            pack_tokens=True,
            pack_seq_length=LENGTH,
            batch_size=BATCH,
            seed=0,
            **options,
        )

    def ids(self, batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        """Tokenize rows: a function for `datasets.map`."""
        contents = batch["content"]
        if isinstance(contents[0], str):
            return {"input_ids": self.tokenizer(contents)["input_ids"]}
        encoded = self.tokenizer.apply_chat_template(contents, tokenize=True, return_dict=True)
        return {"input_ids": encoded["input_ids"]}


def tokenizing(corpus: Corpus, num_proc: list[int | None], rounds: int) -> dict[str, float]:
    """Return tokens per second from the file to the cache."""
    import datasets

    fresh = itertools.count()

    def ours(processes: int | None) -> Run:
        def run() -> None:
            cache = f"ours-{next(fresh)}"
            options = {"tokenization": {"num_proc": processes}}
            build_loader(corpus.mixture(cache, **options), corpus.tokenizer).close()
            shutil.rmtree(corpus.folder / cache)

        return run

    def theirs(processes: int | None) -> Run:
        def run() -> None:
            cache = corpus.folder / f"theirs-{next(fresh)}"
            data = datasets.Dataset.from_json(
                str(corpus.folder / "rows.jsonl"), cache_dir=str(cache)
            )
            assert isinstance(data, datasets.Dataset)
            data.map(corpus.ids, batched=True, remove_columns=["content"], num_proc=processes)
            shutil.rmtree(cache)

        return run

    contenders: dict[str, Run] = {}
    for processes in num_proc:
        name = "" if processes is None else f", {processes} processes"
        contenders[f"ed-data{name}"] = ours(processes)
        contenders[f"datasets.map{name}"] = theirs(processes)
    if missing("grain") is None:
        contenders["grain, in memory"] = lambda: _drained(_grain_tokens(corpus))
    datasets.disable_progress_bars()
    seconds = take_turns(contenders, rounds=rounds)
    return {name: corpus.tokens / value for name, value in seconds.items()}


def loading(corpus: Corpus, rounds: int) -> dict[str, float]:
    """Return tokens per second from the cache to packed batches of numpy arrays."""
    import datasets

    datasets.disable_progress_bars()
    loader = build_loader(corpus.mixture("loading", prefetch_workers=0), corpus.tokenizer)
    starts = range(0, len(corpus.rows), 1000)
    batches = [{"content": corpus.rows[at : at + 1000]} for at in starts]
    ids = [np.asarray(row, np.int32) for b in batches for row in corpus.ids(b)["input_ids"]]
    data = datasets.Dataset.from_dict({"input_ids": ids}).with_format("numpy")

    assert isinstance(loader, Loader)

    def ours() -> None:
        for step in range(loader.steps_per_epoch):
            loader.batch_at(step)

    contenders: dict[str, Run] = {"ed-data": ours}
    if missing("trl") is None:
        from trl.data_utils import pack_dataset

        def packed() -> None:
            with tempfile.TemporaryDirectory() as folder:
                data.save_to_disk(folder)
                own = datasets.load_from_disk(folder)
                assert isinstance(own, datasets.Dataset)
                rows = pack_dataset(own, LENGTH, "bfd").with_format("numpy")
                _drained(rows.iter(BATCH))

        contenders["datasets, packed by TRL"] = packed
    contenders["datasets, unpacked"] = lambda: _drained(data.iter(BATCH))
    if missing("grain") is None:
        contenders["grain, best fit"] = lambda: _drained(_grain_batches(ids))
    seconds = take_turns(contenders, rounds=rounds)
    return {name: corpus.tokens / value for name, value in seconds.items()}


def _drained(items: Any) -> None:
    for _ in items:
        pass


def _grain_tokens(corpus: Corpus) -> Any:
    import grain  # pyright: ignore[reportMissingImports]

    batches = grain.MapDataset.source(corpus.rows).batch(1000, batch_fn=list)
    return batches.map(lambda rows: corpus.ids({"content": rows})["input_ids"])


def _grain_batches(ids: list[np.ndarray]) -> Iterator[Any]:
    import grain  # pyright: ignore[reportMissingImports]

    data = grain.MapDataset.source(ids).seed(0).shuffle()
    rows = data.map(lambda row: {"input_ids": row[:LENGTH]}).to_iter_dataset()
    packed = grain.experimental.BestFitPackIterDataset(
        rows, length_struct={"input_ids": LENGTH}, num_packing_bins=64
    )
    return iter(packed.batch(BATCH))


def waiting(steps: int) -> tuple[float, float]:
    """Return the medians of a step's wait for data and of its duration, in seconds."""
    import statistics

    from ed_elarge import eLargeModel

    with tempfile.TemporaryDirectory() as folder:
        elm = eLargeModel.from_yaml(str(ROOT / "examples/pretrain.yaml"))
        elm.update_config(
            {
                "mixture": {"cache_dir": f"{folder}/cache"},
                "trainer": {
                    "max_training_steps": steps,
                    "save_directory": f"{folder}/run",
                    "save_steps": None,
                    "evaluation_steps": None,
                },
            }
        )
        elm.train()
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if "data_wait" in row][len(rows) // 4 :]
    rates = [row["tokens_per_second"] for row in rows]
    step = [row["tokens"] / rate for row, rate in zip(rows, rates, strict=True)]
    return statistics.median(row["data_wait"] for row in rows), statistics.median(step)


def show(title: str, rates: dict[str, float]) -> str:
    """Return the rates as a table, with their ratio to the first."""
    first = next(iter(rates.values()))
    rows = [[name, f"{rate / 1e6:.2f}", f"{first / rate:.2f}"] for name, rate in rates.items()]
    return table([title, "million tokens/s", "first / this"], rows)


def main() -> None:
    parser = command_line("data", __doc__)
    parser.add_argument("--documents", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", action="store_true")
    parser.add_argument("--num-proc", type=int, nargs="*", default=[])
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    if options.wait:
        wait, step = waiting(options.steps)
        print(
            f"pretrain.yaml: {1e3 * wait:.3f} ms of {1e3 * step:.1f} ms a step: {wait / step:.2%}"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        for package in ("grain", "trl"):
            if line := missing(package):
                print(line)
        corpus = Corpus.make(Path(folder), options.documents, chats=options.chats)
        processes = [None, *options.num_proc]
        print(show("tokenizing", tokenizing(corpus, processes, options.rounds)))
        print(show("loading", loading(corpus, options.rounds)))


if __name__ == "__main__":
    main()
