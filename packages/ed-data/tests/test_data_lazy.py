"""Packing on the fly in bounded memory: evicted documents are read again."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ed_data import build_loader
from ed_data.storage import lazy

TEXTS = [f"{i} " + "sheep " * (i % 40) for i in range(120)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "two/*.jsonl"])
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_on_the_fly_batches_are_equal_with_minimal_memory(
    mixture, tokenizer, tmp_path, monkeypatch, name, strategy
):
    rows = [{"content": text, "other": i} for i, text in enumerate(TEXTS)]
    lines = "\n".join(map(json.dumps, rows))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    elif name == "a.jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif name == "a.jsonl":
        path.write_text(lines)
    else:
        for i in range(2):
            part = rows[i * 60 : i * 60 + 60]
            (path.parent / f"{i}.jsonl").write_text("\n".join(map(json.dumps, part)))
    monkeypatch.setattr("ed_data.order.plan.WINDOW", 50)
    made = mixture(
        informs=[{"data_files": str(path)}],
        pack_strategy=strategy,
        eval_fraction=0.1,
        tokenization={"batch_size": 7},
    )
    kept = build_loader(made, tokenizer, batch_size=2)
    monkeypatch.setattr(lazy, "MAX_STORED_TOKENS", 200)
    made = made.replace(pack_on_the_fly=True)
    loader = build_loader(made, tokenizer, batch_size=2)
    assert loader.fingerprint == kept.fingerprint
    (store,) = loader._order.tokens
    for step in [*range(2 * kept.steps_per_epoch), 0, 3]:
        expected, batch = kept.batch_at(step), loader.batch_at(step)
        assert all(np.array_equal(batch[key], expected[key]) for key in expected)
        assert store.kept <= 200 + max(map(len, TEXTS))
    assert loader.stats == kept.stats


def test_documents_that_cannot_be_encoded_are_counted_once(mixture, tokenizer, jsonl, monkeypatch):
    rows = [{"content": [1, 2, 3 if i % 5 else 99999]} for i in range(20)]
    monkeypatch.setattr(lazy, "MAX_STORED_TOKENS", 10)
    informs = [{"data_files": jsonl(rows), "on_error": "skip"}]
    loader = build_loader(mixture(informs=informs, pack_on_the_fly=True), tokenizer)
    for step in range(4):
        loader.batch_at(step)
    dropped = loader.stats["sources"]["data"]["dropped"]
    assert dropped == {"skipped, because of an error": 4}
