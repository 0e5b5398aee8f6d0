"""Batches: their arrays, their dependence on the step, and resuming."""

from __future__ import annotations

import hashlib
import itertools
import json
import random

import numpy as np
import pytest
from ed_data import DataError, build_loader
from hypothesis import given, settings
from hypothesis import strategies as st

LONG = [f"{i} " + "sheep " * (i % 40) for i in range(50)]


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) for key in first
    )


def segments(batch) -> list[list[int]]:
    """Return the token ids of each segment of a batch."""
    found = []
    for ids, numbers in zip(batch["input_ids"], batch["segment_ids"], strict=True):
        found += [ids[numbers == n].tolist() for n in range(1, numbers.max() + 1)]
    return found


def documents_of(texts, tokenizer) -> list[list[int]]:
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


def flat(lists) -> list[int]:
    return sorted(itertools.chain.from_iterable(lists))


def check_schema(batch, batch_size, seq_length):
    tokens = batch["segment_ids"] > 0
    for name in ("input_ids", "labels", "segment_ids", "position_ids"):
        assert batch[name].shape == (batch_size, seq_length)
        assert batch[name].dtype == np.int32
    assert (batch["labels"][~tokens] == -100).all()
    assert (batch["labels"][tokens] == batch["input_ids"][tokens]).all()
    for numbers, positions in zip(batch["segment_ids"], batch["position_ids"], strict=True):
        used = numbers[numbers > 0]
        assert (numbers[len(used) :] == 0).all(), "padding is at the end"
        starts = np.flatnonzero(np.diff(used, prepend=0))
        assert used[starts].tolist() == list(range(1, len(starts) + 1))
        for begin, end in itertools.pairwise([*starts.tolist(), len(used)]):
            assert positions[begin:end].tolist() == list(range(end - begin))


@pytest.mark.proves("mixture.pack_strategy", "mixture.pack_tokens")
@pytest.mark.parametrize("strategy", ["bfd", "first_fit", "greedy", "wrapped"])
def test_epoch_contains_every_token_once(mixture, tokenizer, strategy):
    made = mixture(LONG, pack_strategy=strategy, pack_seq_length=48)
    loader = build_loader(made, tokenizer, batch_size=1)
    assert loader.seq_length == 48
    found = []
    for step in range(loader.stats["rows"]):
        batch = loader.batch_at(step)
        check_schema(batch, 1, 48)
        found += segments(batch)
    expected = documents_of(LONG, tokenizer)
    assert flat(found) == flat(expected)
    if strategy != "wrapped":  # pieces end only at the sequence length
        pieces = [d[at : at + 48] for d in expected for at in range(0, len(d), 48)]
        assert sorted(found) == sorted(pieces)
    stats = loader.stats
    assert stats["tokens"] == sum(map(len, expected))
    assert stats["fill"] == pytest.approx(stats["tokens"] / (stats["rows"] * 48))


@pytest.mark.proves("mixture.pack_tokens")
def test_unpacked_rows_contain_one_document_each(mixture, tokenizer):
    made = mixture(LONG, pack_tokens=False)
    loader = build_loader(made, tokenizer, batch_size=10, seq_length=32)
    found = []
    for step in range(5):
        batch = loader.batch_at(step)
        assert batch["segment_ids"].max() == 1
        check_schema(batch, 10, 32)
        found += segments(batch)
    assert sorted(found) == sorted(d[:32] for d in documents_of(LONG, tokenizer))
    assert loader.stats["tokens_cut"] > 0


@pytest.mark.proves("mixture.tokenization.truncation")
def test_truncation_false_splits_and_true_truncates(mixture, tokenizer):
    expected = documents_of(LONG, tokenizer)

    def epoch(packed, **tokenization):
        made = mixture(LONG, pack_tokens=packed, pack_seq_length=16, tokenization=tokenization)
        loader = build_loader(made, tokenizer, batch_size=1, seq_length=16)
        batches = [loader.batch_at(step) for step in range(loader.stats["rows"])]
        return sorted(segment for batch in batches for segment in segments(batch))

    pieces = sorted(d[at : at + 16] for d in expected for at in range(0, len(d), 16))
    cut = sorted(d[:16] for d in expected)
    assert epoch(False) == epoch(False, truncation=True) == epoch(True, truncation=True) == cut
    assert epoch(True) == epoch(False, truncation=False) == epoch(True, truncation=False) == pieces
    assert epoch(True, max_length=7) == sorted(d[:7] for d in expected)


@pytest.mark.proves("mixture.tokenization.padding")
def test_longest_padding_pads_batch_to_rounded_longest_row(mixture, tokenizer):
    made = mixture(["a", "b c"], pack_tokens=False, tokenization={"padding": "longest"})
    batch = build_loader(made, tokenizer, batch_size=2, seq_length=512).batch_at(0)
    assert batch["input_ids"].shape == (2, 8)
    assert (batch["input_ids"][batch["segment_ids"] == 0] == tokenizer.pad_token_id).all()


@pytest.mark.proves("mixture.tokenization.return_attention_mask")
def test_attention_mask_is_added_by_option(mixture, tokenizer):
    made = mixture(tokenization={"return_attention_mask": True})
    batch = build_loader(made, tokenizer, batch_size=2).batch_at(0)
    assert np.array_equal(batch["attention_mask"], batch["segment_ids"] > 0)
    assert "attention_mask" not in build_loader(mixture(), tokenizer).batch_at(0)


@pytest.mark.proves("mixture.tokenization.assistant_only_loss")
def test_loss_mask_determines_the_labels(mixture, tokenizer):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"content": chat}, {"content": [*chat, *chat]}]
    for on_the_fly in (False, True):
        made = mixture(
            rows,
            pack_seq_length=256,
            pack_on_the_fly=on_the_fly,
            tokenization={"assistant_only_loss": True},
        )
        batch = build_loader(made, tokenizer).batch_at(0)
        learned = batch["labels"][batch["labels"] != -100]
        assert tokenizer.decode(learned) == "hello<|eos|>" * 3
        plain = build_loader(mixture(rows, pack_seq_length=256), tokenizer).batch_at(0)
        assert np.array_equal(plain["input_ids"], batch["input_ids"])
        assert (plain["labels"] >= 0).sum() > len(learned)


@given(steps=st.lists(st.integers(0, 200), min_size=1, max_size=6), workers=st.integers(0, 3))
@settings(deadline=None, max_examples=15)
def test_batch_depends_only_on_the_step(tokenizer, cached, steps, workers):
    """Batches do not depend on earlier requests, threads, the process, or packing in advance."""
    reference = build_loader(cached, tokenizer, batch_size=4)
    other = cached.replace(prefetch_workers=workers, pack_on_the_fly=workers == 2)
    asked = build_loader(other, tokenizer, batch_size=4)
    for step in steps:
        assert same(asked.batch_at(step), reference.batch_at(step))
    assert asked.fingerprint == reference.fingerprint
    asked.close()


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    from ed_data import Mixture

    folder = tmp_path_factory.mktemp("cached")
    for name, size in (("a", 40), ("b", 15)):
        rows = [{"content": f"{name}{i} " + "goat " * (i % 9)} for i in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Mixture(
        informs=[{"data_files": folder / "a.jsonl"}, {"data_files": folder / "b.jsonl"}],
        mixture_weights={"a": 0.2, "b": 0.8},
        cache_dir=folder / "cache",
        pack_tokens=True,
        pack_seq_length=32,
        prefetch_workers=0,
    )


def test_window_size_changes_only_the_grouping(mixture, tokenizer, monkeypatch):
    """Rows are located across window boundaries, and no row is lost."""
    monkeypatch.setattr("ed_data.order.plan.WINDOW", 7)
    loader = build_loader(mixture(LONG), tokenizer, batch_size=3)
    rows = loader.stats["rows"]
    batches = [loader.batch_at(step) for step in range(-(-rows // 3))]
    found = [batch["input_ids"][i] for batch in batches for i in range(3)][:rows]
    numbers = [batch["segment_ids"][i] for batch in batches for i in range(3)][:rows]
    tokens = np.concatenate([f[n > 0] for f, n in zip(found, numbers, strict=True)])
    assert sorted(tokens.tolist()) == flat(documents_of(LONG, tokenizer))
    fresh = build_loader(mixture(LONG), tokenizer, batch_size=3)
    step = len(batches) + 5  # in the second epoch, without earlier requests
    assert same(fresh.batch_at(step), loader.batch_at(step))


def test_epochs_shuffle_the_same_documents_differently(mixture, tokenizer):
    texts = [f"number {i}" for i in range(32)]
    made = mixture(texts, pack_tokens=False)
    loader = build_loader(made, tokenizer, batch_size=8, seq_length=16)
    assert loader.steps_per_epoch == 4
    epochs = [
        [s for step in range(4) for s in segments(loader.batch_at(4 * epoch + step))]
        for epoch in range(3)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_batch_may_have_more_rows_than_documents(mixture, tokenizer):
    loader = build_loader(
        mixture(["a", "b"], pack_tokens=False), tokenizer, batch_size=8, seq_length=8
    )
    assert loader.steps_per_epoch == 1
    assert len(segments(loader.batch_at(0))) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_continues_in_the_middle_of_an_epoch(mixture, tokenizer, workers):
    made = mixture(LONG, prefetch_workers=workers)
    loader = build_loader(made, tokenizer, batch_size=2)
    uninterrupted = [next(loader) for _ in range(3 * loader.steps_per_epoch)]
    for stop in random.Random(0).sample(range(len(uninterrupted)), 4):
        first = build_loader(made, tokenizer, batch_size=2)
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.state_dict()))
        second = build_loader(made, tokenizer, batch_size=2)
        second.load_state_dict(state)
        for expected, batch in zip(uninterrupted[stop:], second, strict=False):
            assert same(batch, expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 7}, r"order\.seed: 42 → 7"),
        ({"pack_strategy": "greedy"}, r'order\.pack_strategy: "bfd" → "greedy"'),
        ({"pack_shuffle": False}, r"order\.pack_shuffle"),
        ({"pack_seq_length": 32}, r"order\.seq_length: 64 → 32"),
    ],
)
def test_load_state_dict_rejects_changed_options(mixture, tokenizer, change, says):
    state = build_loader(mixture(), tokenizer, batch_size=2).state_dict()
    with pytest.raises(DataError, match=says):
        build_loader(mixture(**change), tokenizer, batch_size=2).load_state_dict(state)


def test_load_state_dict_rejects_changed_data_or_batch_size(mixture, tokenizer):
    state = build_loader(mixture(["a", "b"]), tokenizer, batch_size=2).state_dict()
    with pytest.raises(DataError, match=r"data\.sources\.0:data"):
        build_loader(mixture(["a", "c"]), tokenizer, batch_size=2).load_state_dict(state)
    with pytest.raises(DataError, match="batch_size: 2 → 3"):
        build_loader(mixture(["a", "b"]), tokenizer, batch_size=3).load_state_dict(state)
    # A rewritten file with the same content is the same data.
    build_loader(mixture(["a", "b"]), tokenizer, batch_size=2).load_state_dict(state)


def test_mixture_weights_determine_shares_in_batches(cached, tokenizer):
    loader = build_loader(cached, tokenizer, batch_size=1)
    counts = {"a": 0, "b": 0}
    for step in range(loader.stats["rows"]):
        for ids in segments(loader.batch_at(step)):
            counts[tokenizer.decode(ids[1:])[0]] += 1
    assert counts == {"a": 11, "b": 44}  # 55 documents at 1 : 4
    assert {name: s["per_epoch"] for name, s in loader.stats["sources"].items()} == counts


def test_order_options_change_the_order(mixture, tokenizer):
    texts = [f"number {i}" for i in range(64)]

    def order(shuffle=True, **options):
        made = mixture(texts, pack_tokens=False, **options)
        loader = build_loader(made, tokenizer, batch_size=64, seq_length=16, shuffle=shuffle)
        return [int(tokenizer.decode(ids[1:-1]).split()[1]) for ids in segments(loader.batch_at(0))]

    assert order(shuffle=False) == list(range(64))
    assert order(shuffle_buffer_size=1) == list(range(64))
    near = order(shuffle_buffer_size=8)
    assert near != list(range(64))
    assert max(abs(a - b) for a, b in zip(near, range(64), strict=True)) < 8
    assert order(seed=1) != order(seed=2)


@pytest.mark.proves("mixture.pack_shuffle", "mixture.pack_shuffle_buffer_factor")
def test_packed_rows_are_shuffled_within_their_buffer(mixture, tokenizer):
    texts = [f"{i:02d} " + "x" * 56 for i in range(40)]

    def firsts(**options):
        made = mixture(texts, shuffle_buffer_size=1, **options)
        loader = build_loader(made, tokenizer, batch_size=2)
        batches = [loader.batch_at(step) for step in range(loader.stats["rows"] // 2)]
        return [int(tokenizer.decode(s[1:])[:2]) for batch in batches for s in segments(batch)]

    plain = firsts(pack_shuffle=False)
    assert plain == sorted(plain)
    moved = firsts(pack_shuffle_buffer_factor=2)
    assert moved != plain
    assert sorted(moved) == plain
    assert all(a // 4 == b // 4 for a, b in zip(moved, plain, strict=True))


@pytest.mark.proves("mixture.pack_on_the_fly")
def test_on_the_fly_loader_encodes_only_needed_documents(mixture, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr("ed_data.order.plan.WINDOW", 10)
    loader = build_loader(mixture(LONG, pack_on_the_fly=True), tokenizer, batch_size=1)
    loader.batch_at(0)
    (store,) = loader._order.tokens
    assert store.encoded == 10
    assert loader.stats["documents"] == len(LONG)
    assert store.encoded == len(LONG)
    assert not (tmp_path / "cache").exists()


def test_packing_plan_is_stored_next_to_the_cache(mixture, tokenizer, monkeypatch):
    made = mixture(LONG)
    first = build_loader(made, tokenizer, batch_size=2)
    rows = first.stats["rows"]
    monkeypatch.setattr(
        "ed_data.order.windows.pack", None
    )  # locating a row must not pack an epoch again
    assert build_loader(made, tokenizer, batch_size=2).stats["rows"] == rows


def test_missing_or_conflicting_lengths_raise_data_error(mixture, tokenizer):
    with pytest.raises(DataError, match="the tokenizer is missing"):
        build_loader(mixture())
    with pytest.raises(DataError, match=r"set mixture\.pack_seq_length"):
        build_loader(mixture(pack_seq_length=None), tokenizer)
    with pytest.raises(DataError, match=r"set tokenization\.max_length"):
        build_loader(mixture(pack_tokens=False), tokenizer)
    with pytest.raises(DataError, match=r"seq_length=32 contradicts mixture\.pack_seq_length=64"):
        build_loader(mixture(), tokenizer, seq_length=32)
    with pytest.raises(DataError, match="exceeds the sequence length 16"):
        build_loader(
            mixture(pack_tokens=False, tokenization={"max_length": 20}), tokenizer, seq_length=16
        )
    with pytest.raises(DataError, match="'data' has no documents"):
        build_loader(mixture(["", " "]), tokenizer)
    with pytest.raises(DataError, match=r"cannot load '\./no-such-folder'"):
        build_loader(mixture(tokenization={"tokenizer": "./no-such-folder"}), tokenizer)
    with pytest.raises(DataError, match="'train' or 'eval'"):
        build_loader(mixture(), tokenizer, split="test")
    with pytest.raises(IndexError, match="step -1"):
        build_loader(mixture(), tokenizer).batch_at(-1)


@pytest.mark.proves("mixture.tokenization.tokenizer")
def test_tokenizer_of_the_mixture_is_used(mixture, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tok")
    named = mixture(tokenization={"tokenizer": str(tmp_path / "tok")})
    assert same(
        build_loader(named, batch_size=2).batch_at(0),
        build_loader(mixture(), tokenizer, batch_size=2).batch_at(0),
    )


def test_defaults_of_batch_size_seed_and_cache(mixture, tokenizer, tmp_path):
    loader = build_loader(mixture(batch_size=3), tokenizer)
    assert loader.batch_at(0)["input_ids"].shape == (3, 64)
    seeded = build_loader(mixture(seed=5), tokenizer, seed=6)
    assert seeded.fingerprint == build_loader(mixture(), tokenizer, seed=5).fingerprint
    build_loader(mixture(cache_dir=None), tokenizer, cache_dir=str(tmp_path / "other"))
    assert (tmp_path / "other" / "tokens").exists()


def test_error_of_prefetch_thread_is_raised_with_its_batch():
    from ed_data.batches.loader import Prefetcher

    def make(step):
        if step == 2:
            raise DataError("at step 2")
        return step

    ahead = Prefetcher(make, workers=2, depth=2)
    assert [ahead.get(0), ahead.get(1)] == [0, 1]
    with pytest.raises(DataError, match="at step 2"):
        ahead.get(2)
    assert ahead.get(7) == 7
    ahead.close()


def test_prefetcher_makes_batches_before_request():
    import threading

    from ed_data.batches.loader import Prefetcher

    made, reached = [], threading.Event()

    def make(step):
        made.append(step)
        if step == 3:
            reached.set()
        return step

    ahead = Prefetcher(make, workers=1, depth=3)
    assert ahead.get(0) == 0
    assert reached.wait(60)
    assert sorted(made) == [0, 1, 2, 3]
    ahead.close()
    assert Prefetcher(make, workers=0, depth=3).get(9) == 9
    assert sorted(made) == [0, 1, 2, 3, 9]


def test_prefetcher_stops_at_the_last_step():
    from ed_data.batches.loader import Prefetcher

    made = []
    ahead = Prefetcher(made.append, workers=1, depth=4)
    for step in range(3):
        ahead.get(step, last=3)
    ahead.close()
    assert sorted(made) == [0, 1, 2]


def test_slightly_different_weights_change_the_fingerprint(cached, tokenizer):
    """Even if the numbers of documents are equal after rounding."""
    state = build_loader(cached, tokenizer).state_dict()
    near = cached.replace(mixture_weights={"a": 0.2001, "b": 0.7999})
    with pytest.raises(DataError, match=r"order\.mixture_weights\.a"):
        build_loader(near, tokenizer).load_state_dict(state)


def test_batches_of_pinned_steps_have_pinned_hashes(mixture, tokenizer):
    """The hash is pinned, because a run resumed after an upgrade needs the same batches."""
    rows = [{"content": [3 + (i * j) % 200 for j in range(1 + i % 37)]} for i in range(120)]
    made = mixture(rows, pack_seq_length=32, eval_fraction=0.1)
    loader = build_loader(made, tokenizer, batch_size=4)
    digest = hashlib.sha256()
    for step in range(2 * loader.steps_per_epoch):
        for name, values in sorted(loader.batch_at(step).items()):
            digest.update(name.encode() + values.tobytes())
    assert digest.hexdigest()[:16] == "c6564e36125881be"
