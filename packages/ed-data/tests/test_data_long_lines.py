"""The length of a decompressed line is limited, and reading continues after the line."""

from __future__ import annotations

import gzip
import io

import pytest
from ed_data.errors import DataError
from ed_data.sources import lines


def test_too_long_line_is_an_error_and_the_next_line_is_read(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE", 1000)
    packed = gzip.compress(b"first\n" + b"x" * 3_000_000 + b"\nlast\n")
    read = lines.Lines(gzip.GzipFile(fileobj=io.BytesIO(packed)), "a.jsonl.gz")
    assert next(read) == "first\n"
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2: the line has 1000 bytes or more"):
        next(read)
    spot = read.spot
    assert next(read) == "last\n"
    again = lines.Lines(gzip.GzipFile(fileobj=io.BytesIO(packed)), "a.jsonl.gz", spot)
    assert [*again] == ["last\n"]


def test_too_large_document_raises_data_error(monkeypatch):
    monkeypatch.setattr(lines, "MAX_REST", 1000)
    packed = gzip.compress(b"[" + b" " * 3_000_000 + b"]")
    with pytest.raises(DataError, match="1000 bytes or more"):
        lines.Lines(gzip.GzipFile(fileobj=io.BytesIO(packed)), "a.json.gz").rest()
