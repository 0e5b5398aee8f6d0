"""Memory of the host that is available, within the limit of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ed_infra import host_memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available, without containers."""
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def limit(machine: Path, most: int | str, used: int, files: int) -> None:
    (machine / "memory.max").write_text(f"{most}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    (machine / "memory.stat").write_text(f"anon {used - files}\nfile {files}\n")


def test_available_memory_is_what_the_system_states(machine) -> None:
    assert host_memory.available_bytes() == 8 * GIB
    limit(machine, "max", 3 * GIB, GIB)
    assert host_memory.available_bytes() == 8 * GIB


@pytest.mark.parametrize(
    ("most", "used", "files", "left"), [(4, 3, 1, 2), (100, 3, 1, 8), (2, 3, 0, 0)]
)
def test_limit_of_a_container_counts_without_pages_of_files(
    machine, most, used, files, left
) -> None:
    limit(machine, most * GIB, used * GIB, files * GIB)
    assert host_memory.available_bytes() == left * GIB


def test_half_of_the_memory_counts_where_the_system_states_nothing(machine) -> None:
    (machine / "meminfo").unlink()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory.available_bytes() == memory // 2 > 0
