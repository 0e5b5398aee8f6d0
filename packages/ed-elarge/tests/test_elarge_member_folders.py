"""The copies of a live elastic launch stay, whatever the clock says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ed_elarge.launch.member import lock_folder, remove_abandoned_members, remove_folder

#: Locks the folder of a member, forks a process that lives longer, and waits for its input to end.
MEMBER = """
import os, sys, time
from pathlib import Path
from ed_elarge.launch.member import lock_folder
lock_folder(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def launch(base: Path, name: str) -> Path:
    """Create the folder of a member of a launch that began long ago."""
    copies = base / name / "0"
    copies.mkdir(parents=True)
    (copies / "8.copy").write_bytes(b"shards")
    return copies


def age(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_copies_of_a_live_launch_stay_and_those_of_an_ended_one_go(tmp_path: Path) -> None:
    live, ended, recent = (launch(tmp_path, name) for name in ("live", "ended", "recent"))
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(live)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    child = int(process.stdout.readline())
    try:
        os.close(lock_folder(ended))
        age(live.parent)
        age(ended.parent)
        remove_abandoned_members(tmp_path)
        assert (live / "8.copy").exists() and (recent / "8.copy").exists()
        assert not ended.parent.exists()
        process.kill()  # the run is a fork of the member, and still writes copies
        process.wait()
        age(live.parent)
        remove_abandoned_members(tmp_path)
        assert (live / "8.copy").exists()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        os.kill(child, 9)
    deadline = time.monotonic() + 30
    while live.parent.exists() and time.monotonic() < deadline:  # the child is ending
        age(live.parent)
        remove_abandoned_members(tmp_path)
    assert not live.parent.exists()


def test_clock_that_jumps_deletes_no_live_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = launch(tmp_path, "live")
    descriptor = lock_folder(copies)
    now = time.time()
    for jump in (-1e9, 1e6, 1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        remove_abandoned_members(tmp_path)
        assert (copies / "8.copy").exists()
    os.close(descriptor)


def test_the_last_member_leaves_no_file_of_the_launch(tmp_path: Path) -> None:
    members = [tmp_path / "launch" / str(n) for n in range(3)]
    descriptors = []
    for copies in members:
        copies.mkdir(parents=True)
        (copies / "8.copy").write_bytes(b"shards")
        descriptors.append(lock_folder(copies))
    shutil.rmtree(members[1])  # the memory of a lost host
    for copies, descriptor in zip(members, descriptors, strict=True):
        assert (tmp_path / "launch").exists()
        remove_folder(copies)
        os.close(descriptor)
    assert not (tmp_path / "launch").exists()
