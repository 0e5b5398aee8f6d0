"""Excluded documents keep their places, and no batch contains their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.rows.selection import select_rows
from ed_data.schema import PREFERENCE, PROMPT, TEXT
from pydantic import ValidationError

TEXTS = [f"row {i} tells of {'sheep and goats ' * (i % 7)}and ends" for i in range(60)]
PAIRS = [
    {"prompt": f"{i}?", "chosen": "yes " * (1 + i % 7), "rejected": f"no {i}"} for i in range(40)
]
STEPS = 12


def write_hashes(folder: Path, rows: Any) -> str:
    path = folder / "rows.json"
    path.write_text(json.dumps({"rows": [{"hash": row.hash} for row in rows]}))
    return str(path)


def list_segments(batch: Any, prefix: str = "") -> list[list[tuple[int, ...]]]:
    """Return the tokens of the documents of each row, in their order."""
    rows = zip(batch[f"{prefix}input_ids"], batch[f"{prefix}segment_ids"], strict=True)
    return [
        [tuple(ids[segments == n].tolist()) for n in range(1, int(segments.max()) + 1)]
        for ids, segments in rows
    ]


@pytest.mark.proves("mixture.exclude")
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("schema", [TEXT, PREFERENCE])
def test_batches_lack_the_excluded_documents_and_nothing_else(
    tmp_path: Path, mixture: Any, tokenizer: Any, schema: Any, lazy: bool
) -> None:
    is_text = schema is TEXT
    made = mixture(TEXTS if is_text else PAIRS, pack_on_the_fly=lazy)
    rows = select_rows(made, ["3,7-9", "12"], schema=schema)
    assert [row.row for row in rows] == [3, 7, 8, 9, 12]
    excluded = made.replace(exclude=write_hashes(tmp_path, rows))
    whole, part = (
        build_loader(m, tokenizer, batch_size=3, schema=schema) for m in (made, excluded)
    )
    prefix = "" if is_text else "chosen_"
    uses = whole.find_steps([row.hash for row in rows], STEPS)
    assert part.find_steps([row.hash for row in rows], STEPS) == uses
    dropped = set[tuple[int, ...]]()
    for step in range(STEPS):
        before, after = whole.batch_at(step), part.batch_at(step)
        first, second = list_segments(before, prefix), list_segments(after, prefix)
        missing = sum(map(len, first)) - sum(map(len, second))
        assert missing == sum(used.count(step) for used in uses.values())
        for one, other in zip(first, second, strict=True):
            rest = iter(one)
            assert all(document in rest for document in other)  # the same row and order
            dropped |= set(one) - set(other)
        if not missing:
            assert all(np.array_equal(before[name], after[name]) for name in before)
    assert len(dropped) == len([used for used in uses.values() if used])


def test_state_continues_while_no_step_had_a_place_for_a_changed_exclusion(
    tmp_path: Path, mixture: Any, tokenizer: Any
) -> None:
    made = mixture(TEXTS)
    rows = select_rows(made, ["row=none", "3"], schema=TEXT)
    whole = build_loader(made, tokenizer, batch_size=3)
    first = whole.find_steps([rows[0].hash], 40)[rows[0].hash][0]
    part = build_loader(made.replace(exclude=write_hashes(tmp_path, rows)), tokenizer, batch_size=3)
    for one, other in ((whole, part), (part, whole)):
        state = json.loads(json.dumps(one.state_dict()))
        assert other.fingerprint != one.fingerprint
        assert other.compare_state(state, first) is None
        assert f"step {first + 1} has a place" in str(other.compare_state(state, first + 1))
    other = build_loader(made.replace(seed=7), tokenizer, batch_size=3)
    assert "order" in str(other.compare_state(whole.state_dict(), 0))


def test_copies_of_a_row_are_excluded_with_it(
    tmp_path: Path, mixture: Any, tokenizer: Any, jsonl: Any
) -> None:
    files = [jsonl(TEXTS[:30], "a.jsonl"), jsonl(TEXTS[20:], "b.jsonl")]
    made = mixture(informs=[{"data_files": file} for file in files])
    rows = select_rows(made, ["a:25"], schema=TEXT)
    loader = build_loader(
        made.replace(exclude=write_hashes(tmp_path, rows)), tokenizer, batch_size=70
    )
    documents = [d for row in list_segments(loader.batch_at(0)) for d in row]
    text = tuple(tokenizer(TEXTS[25])["input_ids"])
    assert not any(document[: len(text)] == text for document in documents)
    assert any(
        document[:3] == tuple(tokenizer(TEXTS[26])["input_ids"])[:3] for document in documents
    )
    with pytest.raises(DataError, match=r"INFORM:NUMBER \(informs: a, b\)"):
        select_rows(made, ["25"], schema=TEXT)


def test_store_without_hashes_of_documents_reads_them_again(
    tmp_path: Path, mixture: Any, tokenizer: Any
) -> None:
    made = mixture(PAIRS)
    build_loader(made, tokenizer, schema=PREFERENCE).close()
    (stored,) = (tmp_path / "cache" / "tokens").glob("*/digests.bin")
    stored.unlink()  # as in a store of an earlier version
    rows = select_rows(made, ["5"], schema=PREFERENCE)
    excluded = made.replace(exclude=write_hashes(tmp_path, rows))
    loader = build_loader(excluded, tokenizer, schema=PREFERENCE)
    assert loader.find_steps([rows[0].hash], 40)[rows[0].hash]
    with pytest.raises(DataError, match="no hashes of documents"):
        build_loader(made, tokenizer, schema=PREFERENCE).find_steps([rows[0].hash], 3)


def test_exclusion_that_cannot_be_exact_is_refused(
    tmp_path: Path, mixture: Any, tokenizer: Any
) -> None:
    rows = select_rows(mixture(TEXTS), ["0"], schema=TEXT)
    exclude = write_hashes(tmp_path, rows)
    for options in ({"streaming": True}, {"save": {"path": "saved"}}):
        with pytest.raises(ValidationError, match="excluded"):
            mixture(TEXTS, exclude=exclude, **options)
    with pytest.raises(DataError, match="generates completions for each prompt"):
        build_loader(mixture(PAIRS, exclude=exclude), tokenizer, schema=PROMPT)
    (tmp_path / "other.json").write_text('{"rows": [{"hash": "xyz"}]}')
    for name, message in (("other.json", "names no documents"), ("none.json", "cannot read")):
        with pytest.raises(DataError, match=message):
            build_loader(mixture(TEXTS, exclude=str(tmp_path / name)), tokenizer)
    (tmp_path / "unknown.json").write_text(json.dumps(["0" * 16]))
    with pytest.raises(DataError, match="does not contain"):
        build_loader(mixture(TEXTS, exclude=str(tmp_path / "unknown.json")), tokenizer)
    with pytest.raises(DataError, match="selects no rows"):
        select_rows(mixture(TEXTS), ["words"], schema=TEXT)
