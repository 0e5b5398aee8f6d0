"""Files of installed packages are found by an address, and their hashes are compared."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from ed_infra.errors import CheckpointError
from ed_infra.package_files import find_package_file, is_package_address
from ed_infra.testing import write_package

FILES = {
    "tiny_weights/model.gguf": b"weights",
    "tiny_weights/__init__.py": b"raise RuntimeError('executed')",
    "tiny_weights/folder/config.json": b"{}",
    "tiny_weights/folder/deep/x.bin": b"x",
    "tiny_weights/plain.txt": b"no hash",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    find_package_file.cache_clear()
    write_package(tmp_path, "tiny_weights", FILES)
    return tmp_path


def test_file_and_folder_are_found_without_running_code(site: Path) -> None:
    assert find_package_file("package:tiny_weights/model.gguf") == site / "tiny_weights/model.gguf"
    assert find_package_file("package:tiny-weights/folder") == site / "tiny_weights/folder"
    assert (
        find_package_file("package:tiny_weights/folder/deep") == site / "tiny_weights/folder/deep"
    )
    assert "tiny_weights" not in sys.modules


def test_package_is_found_by_the_name_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    find_package_file.cache_clear()
    write_package(tmp_path, "weights_of_someone", FILES)
    assert find_package_file("package:tiny_weights/model.gguf").read_bytes() == b"weights"


def test_stated_hash_is_compared(site: Path) -> None:
    value = hashlib.sha256(b"weights").hexdigest()
    address = "package:tiny_weights/model.gguf#sha256="
    assert find_package_file(address + value.upper()).name == "model.gguf"
    with pytest.raises(CheckpointError, match=f"has the hash sha256={value}"):
        find_package_file(address + "0" * 64)
    for wrong in ("package:tiny_weights/model.gguf#md5=1", "package:tiny_weights/folder#sha256=1"):
        with pytest.raises(CheckpointError, match="FILE#sha256=HEX"):
            find_package_file(wrong)


@pytest.mark.parametrize("name", ["model.gguf", "folder/deep/x.bin"])
def test_changed_file_is_refused(site: Path, name: str) -> None:
    (site / "tiny_weights" / name).write_bytes(b"other")
    with pytest.raises(CheckpointError, match="install the package again"):
        find_package_file(f"package:tiny_weights/{name.split('/')[0]}")


def test_missing_file_is_refused(site: Path) -> None:
    (site / "tiny_weights/model.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model\.gguf cannot be read"):
        find_package_file("package:tiny_weights/model.gguf")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("package:tiny_weights/model.guf", r"no file 'model\.guf'.*model\.gguf"),
        ("package:tiny_weights/mode", "no file 'mode'"),
        ("package:tiny_weights/plain.txt", "states no hash"),
        ("package:tiny_weights/../../etc/passwd", "write package:NAME/FILE"),
        ("package:tiny_weights", "write package:NAME/FILE"),
        ("package:/etc/passwd", "write package:NAME/FILE"),
        ("package:tiny_weights//etc/passwd", "write package:NAME/FILE"),
        ("package:not_installed/model.gguf", "uv add not-installed"),
    ],
)
def test_wrong_address_is_an_error_with_a_way_out(site: Path, address: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_package_file(address)


def test_only_addresses_of_packages_are_recognized() -> None:
    assert is_package_address("package:a/b")
    for text in ("org/name", "./package:a", Path("package"), None):
        assert not is_package_address(text)
