"""Streams: each token once, an order that depends only on the seed, and exact resume."""

from __future__ import annotations

import gzip
import itertools
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ed_data import DataError, Mixture, StreamLoader, build_loader
from ed_data.order import stream
from ed_data.schema import PREFERENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

KEYS = ("input_ids", "labels", "segment_ids", "position_ids")


def ids_of(number: int, length: int) -> list[int]:
    """Return a document with a unique first token."""
    return [3 + number // 200, 3 + number % 200, *([7 + number % 50] * length)]


def write(folder, files: list[list[list[int]]], kind: str) -> str:
    """Write one file for each list of documents."""
    for number, documents in enumerate(files):
        rows = [{"content": document} for document in documents]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            table = pa.table({"content": pa.array(documents, pa.list_(pa.int64()))})
            pq.write_table(table, path, row_group_size=3)
        elif kind == "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        else:
            path.write_text(lines)
    return f"{folder}/*.{kind}"


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) for key in first
    )


def segments(batch) -> list[list[int]]:
    """Return the tokens of each segment, and check positions, labels and padding."""
    found = []
    for ids, labels, numbers, positions in zip(*(batch[key] for key in KEYS), strict=True):
        assert (labels[numbers == 0] == -100).all()
        assert numbers[numbers > 0].tolist() == sorted(numbers[numbers > 0].tolist())
        for n in range(1, numbers.max() + 1):
            here = numbers == n
            assert positions[here].tolist() == list(range(int(here.sum())))
            assert (labels[here] == ids[here]).all()
            found.append(ids[here].tolist())
    return found


@st.composite
def corpora(draw):
    """Informs with files of documents, and options of a mixture."""
    count = draw(st.integers(1, 3))
    numbers = itertools.count()
    lengths = st.lists(st.integers(0, 40), min_size=0, max_size=12)
    informs = [
        [
            [ids_of(next(numbers), length) for length in draw(lengths)]
            for _ in range(draw(st.integers(1, 3)))
        ]
        for _ in range(count)
    ]
    for files in informs:
        files[0].append(ids_of(next(numbers), 5))
    options = {
        "pack_tokens": draw(st.booleans()),
        "pack_strategy": draw(st.sampled_from(["bfd", "first_fit", "greedy", "wrapped"])),
        "pack_shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
        "shuffle_buffer_size": draw(st.sampled_from([None, 0, 3, 30])),
        "prefetch_workers": draw(st.sampled_from([0, 2])),
        "tokenization": {"truncation": False},
    }
    if not options["pack_tokens"]:
        del options["pack_strategy"], options["pack_shuffle"]
    kind = draw(st.sampled_from(["jsonl", "jsonl.gz", "parquet"]))
    return informs, options, kind, draw(st.integers(1, 3)), draw(st.sampled_from([5, 64]))


def made(tmp_path_factory, informs, options, kind, **more) -> Mixture:
    folder = tmp_path_factory.mktemp("stream")
    patterns = []
    for number, files in enumerate(informs):
        (folder / str(number)).mkdir()
        patterns.append(write(folder / str(number), files, kind))
    return Mixture(
        informs=[{"data_files": p, "name": str(i)} for i, p in enumerate(patterns)],
        streaming=True,
        cache_dir=folder / "cache",
        **options,
        **more,
    )


def epochs(loader, size: int, count: int) -> list[list[list[int]]]:
    """Return the segments of the first epochs, each with `size` tokens."""
    found, tokens = [[]], 0
    while len(found) <= count:
        for segment in segments(next(loader)):
            found[-1].append(segment)
            tokens += len(segment)
            if tokens == size:
                found.append([])
                tokens = 0
    return found[:count]


@given(corpus=corpora())
@settings(deadline=None, max_examples=60)
@pytest.mark.nightly
def test_epoch_contains_every_token_once_and_resumes_exactly(tokenizer, tmp_path_factory, corpus):
    informs, options, kind, rows, window = corpus
    mixture = made(tmp_path_factory, informs, options, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "WINDOW_DOCUMENTS", window)
        patch.setattr(stream, "_ENCODED", 4)

        def fresh(**changes) -> StreamLoader:
            loader = build_loader(
                mixture.replace(**changes), tokenizer, batch_size=rows, seq_length=16
            )
            assert isinstance(loader, StreamLoader)
            return loader

        documents = [
            [*document, tokenizer.eos_token_id]
            for document in itertools.chain.from_iterable(itertools.chain.from_iterable(informs))
        ]
        size = sum(map(len, documents))
        loader = fresh()
        first, second = epochs(loader, size, 2)
        loader.close()
        for epoch in (first, second):
            flat = sorted(itertools.chain.from_iterable(epoch))
            assert flat == sorted(itertools.chain.from_iterable(documents))
            if options.get("pack_strategy") != "wrapped":
                pieces = [d[at : at + 16] for d in documents for at in range(0, len(d), 16)]
                assert sorted(epoch) == sorted(pieces)
        # Only the state matters, not threads or earlier reads.
        whole = [next(loader) for loader in [fresh(prefetch_workers=0)] for _ in range(30)]
        for stop in random.Random(window).sample(range(25), 4):
            before = fresh(prefetch_workers=2)
            for _ in range(stop):
                next(before)
            state = json.loads(json.dumps(before.state_dict()))
            before.close()
            after = fresh()
            next(after)
            after.load_state_dict(state)
            for expected in whole[stop : stop + 5]:
                assert same(next(after), expected)
            after.close()


def test_stream_state_contains_shard_row_and_window(tokenizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(stream, "WINDOW_DOCUMENTS", 8)
    informs = [[[ids_of(i + 50 * k, 9) for i in range(10)] for k in range(3)]]
    options = {"pack_tokens": True, "pack_seq_length": 24, "shuffle_buffer_size": 0}
    mixture = made(tmp_path_factory, informs, options, "jsonl", prefetch_workers=0)
    loader = build_loader(mixture, tokenizer)
    for _ in range(7):  # two documents per row, four rows per window
        next(loader)
    order = loader.state_dict()["order"]
    assert (order["window"], order["row"]) == (1, 3)
    (inform,) = order["documents"]["informs"]
    assert (inform["shard"], inform["row"]) == (0, 8)
    assert len(json.dumps(loader.state_dict())) < 2000
    assert loader.stats["windows"] == 2
    assert loader.stats["fill"] == 1.0
    assert loader.stats["sources"] == {"0": {"documents": 16}}


@pytest.mark.proves("mixture.streaming")
def test_resumed_stream_does_not_reread_consumed_rows(tokenizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(stream, "WINDOW_DOCUMENTS", 8)
    monkeypatch.setattr(stream, "_ENCODED", 8)
    informs = [[[ids_of(i, 9) for i in range(100)]]]
    options = {"pack_tokens": True, "pack_seq_length": 24, "prefetch_workers": 0}
    mixture = made(tmp_path_factory, informs, options, "jsonl")
    loader = build_loader(mixture, tokenizer)
    for _ in range(41):
        next(loader)
    state, expected = loader.state_dict(), next(loader)
    again = build_loader(mixture, tokenizer)
    again.load_state_dict(state)
    assert same(next(again), expected)
    (passes,) = again._order._documents.passes
    assert passes.documents.tally.rows == 8  # the rows of one window


@pytest.mark.parametrize(
    ("strategy", "an_epoch"),
    [("first_exhausted", {0: 20, 1: 4}), ("all_exhausted", {0: 80, 1: 20}), ("restart", None)],
)
def test_stream_follows_mixture_weights_in_each_block(
    tokenizer, tmp_path_factory, strategy, an_epoch
):
    informs = [[[ids_of(i, 3) for i in range(20)]], [[ids_of(1000 + i, 3) for i in range(20)]]]
    mixture = made(
        tmp_path_factory,
        informs,
        {"mixture_weights": {"0": 0.8, "1": 0.2}, "stop_strategy": strategy},
        "jsonl",
        mixture_block_size=10,
        prefetch_workers=0,
    )
    loader = build_loader(mixture, tokenizer, batch_size=10, seq_length=8)
    mixed = loader._order._documents
    epochs, drawn = [[]], []
    while len(drawn) < 401:
        document = mixed.next()
        if document is None:
            epochs.append([])
        else:
            epochs[-1].append(document.inform)
            drawn.append(document.inform)
    for at in range(0, 400, 10):
        assert sum(drawn[at : at + 10]) == 2, "the proportions are exact in each block"
    if an_epoch is None:
        assert len(epochs) == 1
    else:  # the end of a pass is known when its next document is requested
        lengths = {len(epoch) for epoch in epochs[:-1]}
        assert len(lengths) == 1, "all epochs are as long as the first"
        assert 0 <= lengths.pop() - sum(an_epoch.values()) < 10
        first = [epochs[0].count(inform) for inform in range(2)]
        assert [a >= b for a, b in zip(first, an_epoch.values(), strict=True)] == [True, True]


def test_streamed_evaluation_split_is_held_out_of_training(tokenizer, tmp_path_factory):
    informs = [[[ids_of(i, 3) for i in range(300)]]]
    mixture = made(tmp_path_factory, informs, {"eval_fraction": 0.2}, "jsonl")
    evaluation = build_loader(mixture, tokenizer, batch_size=7, seq_length=8, split="eval")
    held = [s for batch in evaluation for s in segments(batch)]
    assert held == [s for batch in evaluation for s in segments(batch)], "each time anew, in order"
    assert 30 < len(held) < 90
    train = build_loader(mixture, tokenizer, batch_size=1, seq_length=8)
    rest = [segments(next(train))[0] for _ in range(300 - len(held))]
    everything = [[*ids_of(i, 3), tokenizer.eos_token_id] for i in range(300)]
    assert sorted(held + rest) == sorted(everything)
    assert train.steps_per_epoch is None
    evaluation.close()
    train.close()


def test_streaming_keeps_preference_pairs_together(tokenizer, jsonl, mixture):
    rows = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(50)]
    made = mixture(rows, streaming=True)
    loader = build_loader(made, tokenizer, batch_size=2, schema=PREFERENCE)
    batch = next(loader)
    for row in range(2):
        for n in range(1, batch["chosen_segment_ids"][row].max() + 1):
            sides = [
                tokenizer.decode(
                    batch[f"{side}_input_ids"][row][batch[f"{side}_segment_ids"][row] == n]
                )
                for side in ("chosen", "rejected")
            ]
            assert sides[0].replace("yes", "no") == sides[1]


def test_state_of_another_inform_or_seed_is_rejected(tokenizer, tmp_path_factory):
    informs = [[[ids_of(i, 3) for i in range(30)]]]
    mixture = made(tmp_path_factory, informs, {}, "jsonl", prefetch_workers=0)
    state = build_loader(mixture, tokenizer, seq_length=8).state_dict()
    copied = made(tmp_path_factory, informs, {}, "jsonl", prefetch_workers=0)
    build_loader(copied, tokenizer, seq_length=8).load_state_dict(state)  # on another machine
    with pytest.raises(DataError, match="seed: 42 → 7"):
        build_loader(mixture.replace(seed=7), tokenizer, seq_length=8).load_state_dict(state)
    informs[0][0].append([5])
    other = made(tmp_path_factory, informs, {}, "jsonl", prefetch_workers=0)
    with pytest.raises(DataError, match=r"data\.sources"):
        build_loader(other, tokenizer, seq_length=8).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_cannot_continue_after_an_error(tokenizer, mixture, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(stream, "WINDOW_DOCUMENTS", 4)
    monkeypatch.setattr(stream, "_ENCODED", 2)
    lines = [json.dumps({"content": f"text {i}"}) for i in range(30)]
    lines[21] = "broken"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    informs = [{"data_files": tmp_path / "a.jsonl"}]
    made = mixture(
        informs=informs,
        streaming=True,
        pack_tokens=False,
        pack_seq_length=None,
        prefetch_workers=workers,
    )
    loader = build_loader(made, tokenizer, seq_length=32)
    for _ in range(20):
        next(loader)
    with pytest.raises(DataError, match=r"a\.jsonl:22: not JSON"):
        next(loader)
    with pytest.raises(DataError, match=r"a\.jsonl:22: not JSON"):
        next(loader)
    loader.close()
    skipping = made.replace(informs=[{**informs[0], "on_error": "skip"}])
    loader = build_loader(skipping, tokenizer, seq_length=32)
    for _ in range(40):
        next(loader)
    dropped = loader.stats["sources"]["a"]["dropped"]
    assert dropped["skipped, because of an error"] >= 1
    loader.close()


def test_window_of_long_documents_ends_at_token_limit(tokenizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(stream, "WINDOW_TOKENS", 500)
    monkeypatch.setattr(stream, "_ENCODED", 2)
    informs = [[[ids_of(i, 100) for i in range(40)]]]
    options = {"pack_tokens": True, "pack_seq_length": 128}
    mixture = made(tmp_path_factory, informs, options, "jsonl", prefetch_workers=0)
    loader = build_loader(mixture, tokenizer)
    next(loader)
    assert loader.stats["documents"] == 6


def test_unsupported_stream_options_raise_error(mixture, tokenizer, tmp_path):
    with pytest.raises(ValidationError, match="a stream cannot be saved"):
        mixture(streaming=True, save={"path": tmp_path / "x"})
    loader = build_loader(mixture(streaming=True, eval_fraction=1e-9), tokenizer, split="eval")
    with pytest.raises(DataError, match="the stream has no documents"):
        next(iter(loader))
    assert not (tmp_path / "cache").exists()
