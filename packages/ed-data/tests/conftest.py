"""A small tokenizer, and fixtures that write data and create mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ed_data import Mixture, train_bpe

TEXTS = [
    f"Document {i} tells of {'sheep and goats ' * (i % 7)}and ends with {i}." for i in range(60)
]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_bpe(TEXTS, 300)


@pytest.fixture
def jsonl(tmp_path: Path) -> Any:
    """Return a function that writes rows (or texts as `content`) to a jsonl file."""

    def write(rows: Any = TEXTS, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"content": row} if isinstance(row, str) else row for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def mixture(tmp_path: Path, jsonl: Any) -> Any:
    """Return a function that creates a mixture of one jsonl file with its own cache."""

    def make(rows: Any = TEXTS, **options: Any) -> Mixture:
        given = {
            "informs": options.get("informs") or [{"data_files": jsonl(rows)}],
            "cache_dir": str(tmp_path / "cache"),
            "pack_tokens": True,
            "pack_seq_length": 64,
            "prefetch_workers": 0,
            **options,
        }
        return Mixture(**given)

    return make
