"""A certificate is shown only next to the files that it was written for."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from ed_esurge import certificates
from ed_esurge.certificates import certificate_summary


def model(folder: Path) -> dict[str, str]:
    """Write the files of a model, and return their hashes."""
    folder.mkdir(parents=True)
    contents = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": bytes(1000)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def certify(folder: Path, files: Any) -> None:
    checks = [{"name": "tensors", "status": "passed"}]
    (folder / "certificate.json").write_text(json.dumps({"files": files, "checks": checks}))


def test_certificate_of_these_files_is_shown(tmp_path: Path) -> None:
    hashes = model(tmp_path / "a")
    certify(tmp_path / "a", hashes)
    summary = certificate_summary(tmp_path / "a")
    assert summary is not None and summary["passed"] == 1
    model(tmp_path / "run/model")
    certify(tmp_path / "run", hashes)
    assert certificate_summary(tmp_path / "run/model") == summary
    assert certificate_summary(tmp_path / "run") == summary


@pytest.mark.parametrize(
    "forge",
    [
        lambda hashes: {},
        lambda hashes: None,
        lambda hashes: [],
        lambda hashes: {**hashes, "model.safetensors": "0" * 64},
        lambda hashes: {**hashes, "model.safetensors": ""},
        lambda hashes: {**hashes, "model.safetensors": None},
        lambda hashes: {k: v for k, v in hashes.items() if k != "tokenizer.json"},
        lambda hashes: {**hashes, "model-00002.safetensors": "0" * 64},
        lambda hashes: {**hashes, "../config.json": hashes["config.json"]},
        lambda hashes: {k: v.upper() for k, v in hashes.items()},
    ],
)
def test_forged_certificate_is_not_shown(tmp_path: Path, forge: Any) -> None:
    hashes = model(tmp_path / "a")
    certify(tmp_path / "a", forge(hashes))
    assert certificate_summary(tmp_path / "a") is None


def test_certificate_is_not_shown_after_the_model_changed(tmp_path: Path) -> None:
    hashes = model(tmp_path / "a")
    certify(tmp_path / "a", hashes)
    assert certificate_summary(tmp_path / "a") is not None
    (tmp_path / "a/model.safetensors").write_bytes(bytes(999) + b"x" * 2)
    assert certificate_summary(tmp_path / "a") is None


def test_large_files_are_hashed_outside_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_SMALL", 100)
    hashes = model(tmp_path / "a")
    certify(tmp_path / "a", hashes)
    deadline = time.monotonic() + 30
    while certificate_summary(tmp_path / "a") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert certificate_summary(tmp_path / "a") is not None
