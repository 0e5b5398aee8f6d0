"""The summary of certificate.json next to the names of models."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from ed_esurge.certificates import certificate_summary
from ed_esurge.server.generation.answers import ModelCard
from ed_esurge.server.generation.models import build_certificate_fields


def written(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "certificate.json").write_text(text)
    return folder


def checks(*statuses: str) -> dict[str, Any]:
    return {"checks": [{"name": f"check{i}", "status": s} for i, s in enumerate(statuses)]}


def test_entry_of_a_model_counts_checks_and_names_failed_ones(tmp_path: Path) -> None:
    run = written(tmp_path / "run", checks("passed", "failed", "passed", "not applicable"))
    summary = certificate_summary(run)
    expected = {"passed": 2, "failed": 1, "not_applicable": 1, "failed_checks": ["check1"]}
    assert summary == certificate_summary(run / "model") == expected
    facts = {"id": "a", "object": "model", "created": 1, "owned_by": "me", "root": "a"}
    card = {**facts, "parent": None, "max_model_len": 1, **build_certificate_fields(summary)}
    assert ModelCard(**card).model_dump(exclude_unset=True) == card
    assert certificate_summary(tmp_path) is None
    assert build_certificate_fields(None) == {}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "[" * 100_000, {"checks": 3}, {"checks": [{"name": "a"}]}, checks("unknown")],
)
def test_damaged_certificate_is_ignored_with_a_message(
    tmp_path: Path, content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert certificate_summary(written(tmp_path, content)) is None
    assert "is ignored" in caplog.text


def test_large_certificate_is_ignored_and_long_lists_are_cut(tmp_path: Path) -> None:
    assert certificate_summary(written(tmp_path / "large", " " * 2**20 + "{}")) is None
    summary = certificate_summary(written(tmp_path / "long", checks(*["failed"] * 1000)))
    assert summary is not None
    assert summary["failed"] == 1000
    assert len(summary["failed_checks"]) == 64


def test_certificate_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **options: reads.append(path) or read(path, **options)
    )
    folder = written(tmp_path / "run", checks("passed"))
    first = certificate_summary(folder)
    assert first is not None
    first["failed_checks"].append("changed by the caller")
    again = certificate_summary(folder)
    assert (len(reads), again and again["failed_checks"]) == (1, [])
    written(folder, checks("failed"))
    os.utime(folder / "certificate.json", (0, 0))
    changed = certificate_summary(folder)
    assert (len(reads), changed and changed["failed"]) == (2, 1)
