"""`elarge launch --elastic`: lost processes and hosts, returned members, and equal losses.

`EASYDEL_ELASTIC_KILLS` sets the number of random kills (default 5).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench.recovery import ELARGE, MODEL_AND_DATA

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc"),
]

KILLS = int(os.environ.get("EASYDEL_ELASTIC_KILLS", "5"))
_OF_TESTS = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
RUN = f"""\
{MODEL_AND_DATA}\
trainer: {{trainer_type: sft, total_batch_size: 8, max_training_steps: STEPS, log_steps: 1,
  save_steps: 200, memory_save_steps: 5, learning_rate: 1.0e-5, save_directory: runs/elastic}}
actions: [train]
"""


def losses(folder: Path) -> dict[int, float]:
    path = folder / "runs/elastic/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # a row that is being written
            break
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == [*range(1, len(steps) + 1)]  # none is skipped or repeated
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def uninterrupted(folder: Path, steps: int) -> dict[int, float]:
    """The losses of one process with four devices."""
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN.replace("STEPS", str(steps)))
    one = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([ELARGE, "run.yaml"], cwd=folder, env=one, check=True, capture_output=True)
    return losses(folder)


class ElasticLaunch:
    """A launch of four members in the background."""

    def __init__(self, folder: Path, steps: int, *, rejoin: float):
        folder.mkdir()
        self.folder, self.log = folder, folder / "launch.log"
        (folder / "run.yaml").write_text(RUN.replace("STEPS", str(steps)))
        words = [ELARGE, "launch", "run.yaml", "--on", "local", "--processes-per-host", "4"]
        words += ["--elastic", "2", "--rejoin", str(rejoin)]
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # As a user starts a run: with the cache of the command line, which stores train steps.
        kept = {name: value for name, value in os.environ.items() if name not in _OF_TESTS}
        environment = {**kept, "PATH": programs, "XDG_CACHE_HOME": str(folder.parent / "cache")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environment, stdout=log, stderr=log
            )

    def lines(self) -> str:
        return self.log.read_text(errors="replace")

    def starts(self) -> list[int]:
        """The number of processes of each start."""
        return [int(n) for n in re.findall(r"elastic: .*?(\d+) processes on", self.lines())]

    def reach(self, step: int, *, starts: int = 0) -> None:
        end = time.monotonic() + 900
        while len(losses(self.folder)) < step or len(self.starts()) < starts:
            assert self.process.poll() is None, self.lines()[-5000:]
            assert time.monotonic() < end, self.lines()[-5000:]
            time.sleep(0.05)

    def members(self) -> dict[int, list[int]]:
        """The processes of each member: its own first, then those of the run."""
        found: dict[int, list[int]] = {}
        for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            try:
                words = path.joinpath("cmdline").read_bytes().decode().split("\0")
                if path.joinpath("cwd").readlink() != self.folder or "member" not in words:
                    continue
            except OSError:
                continue
            if words[0] != "bash":
                number = int(words[words.index("member") + 1].partition("/")[2])
                found.setdefault(number, []).append(int(path.name))
        return found

    def copies(self) -> Path:
        """The folder with the copies of the state."""
        words = Path(f"/proc/{self.members()[0][0]}/cmdline").read_bytes().decode().split("\0")
        launch = words[words.index("member") + 1].partition("/")[0]
        return Path(f"/dev/shm/elarge-{os.getuid()}/{launch}")

    def end(self) -> None:
        assert self.process.wait(1800) == 0, self.lines()[-5000:]


def check_same(found: dict[int, float], expected: dict[int, float]) -> float:
    """Compare the losses, and return the largest relative difference."""
    assert [*found] == [*expected]
    worst = max(abs(found[step] / loss - 1) for step, loss in expected.items())
    assert worst <= 1e-6
    return worst


def test_run_continues_with_three_processes_and_takes_the_fourth_back(
    tmp_path: Path, record_property
) -> None:
    expected = uninterrupted(tmp_path / "alone", 600)
    launch = ElasticLaunch(tmp_path / "elastic", 600, rejoin=1)
    copies = None
    # The first run of three processes compiles its programs; the second reads them from files.
    for number, compiled in enumerate(("compiled", "read")):
        launch.reach(len(losses(launch.folder)) + 40, starts=1 + 2 * number)
        copies = launch.copies()
        # A lost host: its program, its process and its memory.
        os.kill(launch.members()[1][0], signal.SIGKILL)
        shutil.rmtree(copies / "1")
        began, before = time.monotonic(), len(losses(launch.folder))
        launch.reach(before + 1, starts=2 + 2 * number)
        record_property(f"seconds_with_programs_{compiled}", time.monotonic() - began)
        launch.reach(before + 20, starts=3 + 2 * number)
    launch.end()
    assert launch.starts() == [4, 3, 4, 3, 4]
    assert "read from the memory of the hosts" in launch.lines()
    record_property("difference", check_same(losses(launch.folder), expected))
    assert copies is not None and not copies.exists()
    summary = json.loads((launch.folder / "runs/elastic/summary.json").read_text())
    assert "lost_seconds" in json.dumps(summary)


def test_random_kills_change_no_loss(tmp_path: Path, record_property) -> None:
    choose = random.Random(KILLS)
    steps = 45 * KILLS + 80
    expected = uninterrupted(tmp_path / "alone", steps)
    launch = ElasticLaunch(tmp_path / "elastic", steps, rejoin=2)
    done, seconds = 0, []
    while done < KILLS:
        launch.reach(min(len(losses(launch.folder)) + choose.randrange(5, 25), steps - 60))
        if len(losses(launch.folder)) >= steps - 60:
            break
        members = launch.members()
        victims = members[choose.choice([*members])]
        victim = victims[-1] if choose.random() < 0.5 else victims[0]
        starts, before = len(launch.starts()), len(losses(launch.folder))
        os.kill(victim, signal.SIGKILL)
        done, began = done + 1, time.monotonic()
        launch.reach(before + 1, starts=starts + 1)
        seconds.append(time.monotonic() - began)
    launch.end()
    record_property("kills", done)
    record_property("median_seconds", sorted(seconds)[len(seconds) // 2])
    record_property("most_seconds", max(seconds))
    record_property("load", os.getloadavg()[0])
    record_property("difference", check_same(losses(launch.folder), expected))
    assert done == KILLS
    print(f"{done} kills; seconds until a new step: {[round(value, 1) for value in seconds]}")
