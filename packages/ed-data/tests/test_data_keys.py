"""Effects of the keys of `mixture` that no other test covers from option to batch."""

from __future__ import annotations

import logging
import os

import fsspec
import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.sources import files


def sources_of(loader, tokenizer, steps: int) -> str:
    """Return the first letter of each document of some batches, in order."""
    rows = [row for step in range(steps) for row in loader.batch_at(step)["input_ids"]]
    return "".join(tokenizer.decode(row, skip_special_tokens=True)[0] for row in rows)


@pytest.fixture
def two(mixture, jsonl):
    """Two informs of 8 and 24 documents, one per row, with different first letters."""

    def make(**options):
        informs = [
            {"data_files": jsonl([f"a{i}" for i in range(8)], "1.jsonl"), "name": "few"},
            {"data_files": jsonl([f"b{i}" for i in range(24)], "2.jsonl"), "name": "many"},
        ]
        given = {"mixture_weights": {"few": 1, "many": 1}, "pack_tokens": False, **options}
        return mixture(informs=informs, tokenization={"max_length": 16}, **given)

    return make


@pytest.mark.proves(
    "mixture.block_mixture",
    "mixture.mixture_block_size",
    "mixture.mixture_weights",
    "mixture.informs.name",
)
def test_proportions_are_exact_in_each_block(two, tokenizer):
    def counts(**options) -> list[int]:
        loader = build_loader(two(**options), tokenizer, batch_size=4)
        drawn = sources_of(loader, tokenizer, 8)
        return [drawn[i : i + 4].count("a") for i in range(0, 32, 4)]

    assert counts(mixture_block_size=4) == [2] * 8
    assert counts(mixture_block_size=16) != [2] * 8
    assert counts(mixture_block_size=16)[:4] != counts(block_mixture=False)[:4]
    assert sum(counts(block_mixture=False)) == 16
    assert counts(mixture_block_size=4, mixture_weights={"few": 1, "many": 3}) == [1] * 8


@pytest.mark.proves("mixture.stop_strategy")
@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("restart", 32), ("first_exhausted", 16), ("longest", 48), ("all_exhausted", 48)],
)
def test_stop_strategy_determines_epoch_length(two, tokenizer, strategy, steps):
    loader = build_loader(two(stop_strategy=strategy), tokenizer, batch_size=1)
    assert loader.steps_per_epoch == steps


@pytest.mark.proves("mixture.prefetch_workers", "mixture.prefetch_buffer_size")
@pytest.mark.parametrize(("workers", "depth", "made"), [(0, 4, 1), (2, 0, 1), (2, 3, 4)])
def test_loader_prefetches_configured_number_of_batches(
    two, tokenizer, monkeypatch, workers, depth, made
):
    options = {"prefetch_workers": workers, "prefetch_buffer_size": depth}
    loader = build_loader(two(**options), tokenizer, batch_size=2)
    loader.batch_at(0)
    futures = list(loader._prefetch._ahead.values())
    assert len(futures) == made - 1
    assert all(future.result()["input_ids"].shape == (2, 16) for future in futures)
    loader.close()


@pytest.fixture
def far(monkeypatch):
    """A remote file; yields the number of downloads and the number of initial failures."""
    fs = fsspec.filesystem("memory")
    fs.pipe("/ed_data_keys/a.jsonl", b'{"content": "far away"}\n' * 3)
    fetched, failures, fetch = [], [], fs.get_file

    def get_file(path, target):
        if failures:
            failures.pop()
            raise RuntimeError("busy")
        fetched.append(path)
        fetch(path, target)

    monkeypatch.setattr(fs, "get_file", get_file)
    yield fetched, failures
    fs.rm("/ed_data_keys", recursive=True)


@pytest.mark.proves(
    "mixture.cache_remote_files",
    "mixture.cloud_max_retries",
    "mixture.cloud_retry_delay",
    "mixture.cache_expiry_seconds",
    "mixture.cache_dir",
)
def test_remote_files_are_cached_retried_and_refetched_after_expiry(
    mixture, tokenizer, tmp_path, monkeypatch, far, caplog
):
    fetched, failures = far
    waited: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    informs = [{"data_files": "memory://ed_data_keys/a.jsonl"}]

    def load(number: int, **options) -> None:
        # Another end id produces other tokens, so the file is read again.
        made = mixture(informs=informs, pack_eos_token_id=number, **options)
        build_loader(made, tokenizer)

    load(1, cache_remote_files=False)
    assert fetched == []
    load(2)
    assert len(fetched) == 1
    load(3)
    assert len(fetched) == 1, "the copy is read"
    (copy,) = (tmp_path / "cache" / "files").rglob("a.jsonl")
    os.utime(copy, (copy.stat().st_mtime - 60,) * 2)
    load(4, cache_expiry_seconds=100)
    assert len(fetched) == 1
    failures[:] = [1, 1]
    with caplog.at_level(logging.WARNING):
        load(5, cache_expiry_seconds=50, cloud_max_retries=2, cloud_retry_delay=7)
    assert len(fetched) == 2
    assert waited == [7, 14]
    os.utime(copy, (copy.stat().st_mtime - 60,) * 2)
    failures[:] = [1, 1]
    with pytest.raises(DataError, match="cannot be downloaded: busy"):
        load(6, cache_expiry_seconds=50, cloud_max_retries=1)


@pytest.mark.proves(
    "mixture.pack_eos_token_id",
    "mixture.pack_seq_length",
    "mixture.tokenization.add_special_tokens",
    "mixture.tokenization.max_length",
    "mixture.tokenization",
)
def test_tokenization_options_change_document_tokens(mixture, tokenizer):
    def row(**options) -> list[int]:
        batch = build_loader(mixture(["ab ab"], **options), tokenizer).batch_at(0)
        return batch["input_ids"][0][batch["segment_ids"][0] > 0].tolist()

    plain = row()
    assert plain[-1] == tokenizer.eos_token_id
    assert plain[0] == tokenizer.bos_token_id
    assert row(pack_eos_token_id=9) == [*plain[:-1], 9]
    assert row(tokenization={"add_special_tokens": False}) == plain[1:]
    assert row(tokenization={"max_length": 2}) == plain[:2]
    assert build_loader(mixture(pack_seq_length=48), tokenizer).seq_length == 48


@pytest.mark.proves("mixture.tokenization.batch_size")
def test_documents_are_encoded_in_batches(mixture, tokenizer, monkeypatch):
    from ed_data.tokens.encoder import Encoder

    sizes, encode = [], Encoder.encode

    def counted(self, documents, label, skip=None):
        sizes.append(len(documents))
        return encode(self, documents, label, skip)

    monkeypatch.setattr(Encoder, "encode", counted)
    build_loader(mixture(tokenization={"batch_size": 25}), tokenizer)
    assert sizes == [25, 25, 10]


@pytest.mark.proves("mixture.informs.split", "mixture.informs.data_files", "mixture.informs")
def test_split_selects_files_by_split(mixture, tokenizer, jsonl):
    by_split = {"train": jsonl(["one"] * 2, "t.jsonl"), "test": jsonl(["two"] * 3, "v.jsonl")}
    for split, documents in (("train", 2), ("test", 3)):
        made = mixture(informs=[{"data_files": by_split, "split": split, "type": "json"}])
        assert build_loader(made, tokenizer).stats["documents"] == documents


@pytest.mark.proves("mixture.batch_size", "mixture.seed", "mixture.shuffle_buffer_size")
def test_batch_size_seed_and_shuffle_buffer_take_effect(mixture, tokenizer):
    def first(**options) -> np.ndarray:
        made = mixture(pack_shuffle=False, **options)
        return build_loader(made, tokenizer).batch_at(0)["input_ids"]

    assert first(batch_size=3).shape == (3, 64)
    assert not np.array_equal(first(seed=1), first(seed=2))
    assert np.array_equal(
        first(seed=1, shuffle_buffer_size=1), first(seed=2, shuffle_buffer_size=0)
    )
