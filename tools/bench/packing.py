"""How full rows are, and how fast they are planned: each strategy, streamed and not, and for pairs.

    uv run python -m tools.bench.packing
    uv run python -m tools.bench.packing --documents 200000 --length 4096

Lengths are those of chats: lognormal, with a median of 350 tokens and a tail to the row length; of
pairs, two answers of unlike lengths to one prompt. Figures are of one core and of one run. `bisect`
is best-fit decreasing with the rooms of the open rows in a sorted list. Where TRL and grain are
installed, their own packers run on the same lengths: they move the tokens too, which are one byte
each here. grain packs a stream into 64 open rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ed_data.packing import Packing, pack
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
STREAM_WINDOW = 4096
WINDOW = 16_384


@dataclass(frozen=True)
class Figure:
    """One way to pack.

    Attributes:
        name: the way.
        length: tokens of a row.
        fill: share of the positions that hold a token.
        rate: documents a second, on one core.
    """

    name: str
    length: int
    fill: float
    rate: float


def chat_lengths(documents: int, limit: int, seed: int = 0) -> IntArray:
    """Lengths of chats: lognormal, cut at the row length."""
    draws = np.random.default_rng(seed).lognormal(np.log(350), 1.0, documents)
    return np.clip(draws.astype(np.int64), 16, limit)


def pair_lengths(documents: int, limit: int, seed: int = 0) -> IntArray:
    """[2, documents] lengths of both answers, each with its prompt."""
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(np.log(120), 0.8, documents), 8, limit // 2)
    answers = rng.lognormal(np.log(230), 0.5, (2, documents))
    return np.clip((prompt + answers).astype(np.int64), 16, limit)


def in_windows(lengths: IntArray, capacity: int, strategy: str, window: int) -> list[Packing]:
    """Pack each window of documents by itself."""
    starts = range(0, len(lengths), window)
    return [pack(lengths[at : at + window], capacity, strategy) for at in starts]


def bisect_rows(lengths: IntArray, capacity: int) -> int:
    """Best-fit decreasing with a sorted list of rooms, as TRL; returns the number of rows."""
    rooms: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        if room > length:
            insort(rooms, (room - length, row))
    return len(rows)


def _timed(name: str, documents: int, tokens: int, length: int, plan: Callable[[], int]) -> Figure:
    begin = time.perf_counter()
    rows = plan()
    seconds = time.perf_counter() - begin
    return Figure(name, length, tokens / (rows * length), documents / seconds)


def theirs(lengths: IntArray, capacity: int) -> dict[str, Callable[[], int]]:
    """Packers of other projects that are installed, by name; each returns the number of rows."""
    tokens = [np.zeros(int(length), np.uint8) for length in lengths]
    found: dict[str, Callable[[], int]] = {}
    if importlib.util.find_spec("trl") is not None:
        import pyarrow as pa
        from trl.data_utils import _pack_bfd  # pack_dataset adds the map of `datasets` around it

        tables = [
            pa.table({"input_ids": pa.array(tokens[at : at + WINDOW])})
            for at in range(0, len(tokens), WINDOW)
        ]
        found[f"TRL's bfd, window {WINDOW:,}"] = lambda: sum(
            len(_pack_bfd(table, capacity)) for table in tables
        )
    if importlib.util.find_spec("grain") is not None:
        import grain  # pyright: ignore[reportMissingImports]

        documents = grain.MapDataset.source([{"input_ids": each} for each in tokens])
        packed = grain.experimental.BestFitPackIterDataset(
            documents.to_iter_dataset(), length_struct={"input_ids": capacity}, num_packing_bins=64
        )
        found["grain's best fit, 64 rows"] = lambda: sum(1 for _ in packed)
    return found


def figures(documents: int, length: int) -> list[Figure]:
    """Every way to pack, for one row length."""
    lengths = chat_lengths(documents, length)
    tokens = int(lengths.sum())

    def ours(strategy: str, window: int) -> Callable[[], int]:
        return lambda: sum(p.rows for p in in_windows(lengths, length, strategy, window))

    result = [
        _timed(f"{name}, window {window:,}", documents, tokens, length, ours(name, window))
        for name, window in [
            ("bfd", WINDOW),
            ("bfd", STREAM_WINDOW),
            ("first_fit", WINDOW),
            ("greedy", WINDOW),
            ("wrapped", WINDOW),
        ]
    ]

    def bisected() -> int:
        starts = range(0, documents, WINDOW)
        return sum(bisect_rows(lengths[at : at + WINDOW], length) for at in starts)

    result.append(_timed(f"bisect, window {WINDOW:,}", documents, tokens, length, bisected))
    pairs = pair_lengths(documents, length)
    longest = pairs.max(axis=0)
    for window in (WINDOW, STREAM_WINDOW):
        result.append(
            _timed(
                f"bfd for pairs, window {window:,}",
                documents,
                int(longest.sum()),
                length,
                lambda window=window: sum(
                    p.rows for p in in_windows(longest, length, "bfd", window)
                ),
            )
        )
    return result


def compared(documents: int, length: int) -> list[Figure]:
    """The packers of other projects, on the same lengths."""
    lengths = chat_lengths(documents, length)
    tokens = int(lengths.sum())
    plans = theirs(lengths, length)
    return [_timed(name, documents, tokens, length, plan) for name, plan in plans.items()]


def show(found: list[Figure]) -> str:
    """A table."""
    lines = [f"{'strategy':<36} {'row':>6} {'fill':>9} {'documents/s':>13}"]
    lines += [f"{f.name:<36} {f.length:>6} {f.fill:>9.3%} {f.rate:>13,.0f}" for f in found]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=131_072)
    parser.add_argument("--length", type=int, action="append")
    options = parser.parse_args()
    for package in ("trl", "grain"):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: no figures of it")
    for length in options.length or [4096, 8192]:
        print(show(figures(options.documents, length) + compared(options.documents, length)))


if __name__ == "__main__":
    main()
