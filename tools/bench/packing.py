"""Measure how full packed rows are and how fast they are planned, for each strategy.

    uv run python -m tools.bench.packing
    uv run python -m tools.bench.packing --documents 200000 --length 4096

The lengths resemble chats: lognormal, with a median of 350 tokens and a tail up to the row length.
Pairs have two answers of different lengths to one prompt. Figures are for one core; runs are
interleaved, and medians are compared. `bisect` is best-fit decreasing with the free space of the
open rows in a sorted list.

If TRL and grain are installed, their packers run on the first 16,384 of the same lengths. They move
the tokens (one byte each) into rows and number their positions, and so does this project's packer
in that table; grain also creates segment numbers and padding. grain packs a stream into 64 open
rows.
"""

from __future__ import annotations

import importlib.util
import os
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
from ed_data.order.packing import Packing, pack
from ed_data.storage.store import concat_ranges
from numpy.typing import NDArray

from tools.bench.measure import all_turns, command_line, table

IntArray = NDArray[np.int64]
STREAM_WINDOW = 4096
WINDOW = 16_384
COMPARED = 16_384  # number of documents in the comparison with packers that move tokens


@dataclass(frozen=True)
class Figure:
    """The result of one packing strategy.

    Attributes:
        name: Name of the strategy.
        length: Number of positions per row.
        fill: Share of positions that contain a token.
        rate: Documents per second on one core.
    """

    name: str
    length: int
    fill: float
    rate: float


def chat_lengths(documents: int, limit: int, seed: int = 0) -> IntArray:
    """Return lengths of chats: lognormal, clipped at the row length."""
    draws = np.random.default_rng(seed).lognormal(np.log(350), 1.0, documents)
    return np.clip(draws.astype(np.int64), 16, limit)


def pair_lengths(documents: int, limit: int, seed: int = 0) -> IntArray:
    """Return the lengths [2, documents] of both answers, each including its prompt."""
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(np.log(120), 0.8, documents), 8, limit // 2)
    answers = rng.lognormal(np.log(230), 0.5, (2, documents))
    return np.clip((prompt + answers).astype(np.int64), 16, limit)


def in_windows(lengths: IntArray, capacity: int, strategy: str, window: int) -> list[Packing]:
    """Pack each window of documents separately."""
    starts = range(0, len(lengths), window)
    return [pack(lengths[at : at + window], capacity, strategy) for at in starts]


def bisect_rows(lengths: IntArray, capacity: int) -> int:
    """Count the rows of best-fit decreasing with a sorted list of free spaces, as in TRL."""
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


def moved(
    tokens: NDArray[np.uint8], lengths: IntArray, capacity: int
) -> tuple[NDArray[np.uint8], IntArray]:
    """Plan rows, and move the tokens into the rows.

    Returns:
        The tokens [rows, capacity] and their positions in their documents; 0 in free positions.
    """
    packing = pack(lengths, capacity)
    first = (np.cumsum(lengths) - lengths)[packing.document] + packing.start
    rows = np.repeat(np.arange(packing.rows), np.diff(packing.row_offsets))
    before = np.cumsum(packing.length) - packing.length
    column = before - before[packing.row_offsets[:-1]][rows]
    target = concat_ranges(rows * capacity + column, packing.length)
    moved_tokens = np.zeros((packing.rows, capacity), np.uint8)
    positions = np.zeros((packing.rows, capacity), np.int64)
    moved_tokens.reshape(-1)[target] = tokens[concat_ranges(first, packing.length)]
    positions.reshape(-1)[target] = concat_ranges(packing.start, packing.length)
    return moved_tokens, positions


def timed(
    plans: dict[str, Callable[[], int]],
    tokens: dict[str, int],
    documents: int,
    capacity: int,
    rounds: int,
) -> list[Figure]:
    """Time the plans in interleaved runs."""
    rows: dict[str, int] = {}

    def run(name: str) -> Callable[[], None]:
        return lambda: rows.update({name: plans[name]()})

    seconds = all_turns({name: run(name) for name in plans}, rounds=rounds)
    return [
        Figure(
            name,
            capacity,
            tokens[name] / (rows[name] * capacity),
            documents / median(seconds[name]),
        )
        for name in plans
    ]


def theirs(lengths: IntArray, capacity: int) -> dict[str, Callable[[], int]]:
    """Return the installed packers of other projects by name; each returns the number of rows."""
    tokens = [np.zeros(int(length), np.uint8) for length in lengths]
    found: dict[str, Callable[[], int]] = {}
    if importlib.util.find_spec("trl") is not None:
        import pyarrow as pa
        from trl.data_utils import _pack_bfd  # pack_dataset wraps this function in `datasets.map`

        tokens_of_all = pa.table({"input_ids": pa.array(tokens)})
        found["TRL's bfd"] = lambda: len(_pack_bfd(tokens_of_all, capacity))
    if importlib.util.find_spec("grain") is not None:
        import grain  # pyright: ignore[reportMissingImports]

        documents = grain.MapDataset.source([{"input_ids": each} for each in tokens])
        packed = grain.experimental.BestFitPackIterDataset(
            documents.to_iter_dataset(), length_struct={"input_ids": capacity}, num_packing_bins=64
        )
        found["grain's best fit, 64 rows"] = lambda: sum(1 for _ in packed)
    return found


def figures(documents: int, length: int, rounds: int) -> list[Figure]:
    """Measure all planning strategies for one row length."""
    chats = chat_lengths(documents, length)
    pairs = pair_lengths(documents, length).max(axis=0)

    def ours(lengths: IntArray, strategy: str, window: int) -> Callable[[], int]:
        return lambda: sum(p.rows for p in in_windows(lengths, length, strategy, window))

    def bisected() -> int:
        starts = range(0, documents, WINDOW)
        return sum(bisect_rows(chats[at : at + WINDOW], length) for at in starts)

    plans = {
        "bfd": ours(chats, "bfd", WINDOW),
        f"bfd, window {STREAM_WINDOW:,}": ours(chats, "bfd", STREAM_WINDOW),
        **{name: ours(chats, name, WINDOW) for name in ("first_fit", "greedy", "wrapped")},
        "bisect": bisected,
    }
    tokens = dict.fromkeys(plans, int(chats.sum()))
    of_pairs = {
        "bfd for pairs": ours(pairs, "bfd", WINDOW),
        f"bfd for pairs, window {STREAM_WINDOW:,}": ours(pairs, "bfd", STREAM_WINDOW),
    }
    tokens |= dict.fromkeys(of_pairs, int(pairs.sum()))
    return timed({**plans, **of_pairs}, tokens, documents, length, rounds)


def compared(length: int, rounds: int) -> list[Figure]:
    """Measure packers that move the tokens: this project's and those of other projects."""
    lengths = chat_lengths(COMPARED, length)
    tokens = np.zeros(int(lengths.sum()), np.uint8)
    plans = {"bfd": lambda: len(moved(tokens, lengths, length)[0]), **theirs(lengths, length)}
    return timed(plans, dict.fromkeys(plans, len(tokens)), COMPARED, length, rounds)


def show(title: str, found: list[Figure]) -> str:
    rows = [[f.name, str(f.length), f"{f.fill:.3%}", f"{f.rate:,.0f}"] for f in found]
    return table([title, "row", "fill", "documents/s"], rows)


def main() -> None:
    parser = command_line("packing", __doc__)
    parser.add_argument("--documents", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, action="append")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core for all contenders
    for package in ("trl", "grain"):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed, so it is not measured")
    for length in options.length or [4096, 8192]:
        print(show("planning", figures(options.documents, length, options.rounds)))
        print(show("with tokens", compared(length, options.rounds)))


if __name__ == "__main__":
    main()
