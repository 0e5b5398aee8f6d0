"""A run that is killed (SIGKILL) and started again equals one that never was.

At random steps, and while a checkpoint is being written: the same rows in the record, no step lost,
none twice, every loss equal to the last bit.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import kill_target
import pytest
from ed_trainers.figures.metrics import CLOCKED, read_metrics

TARGET = Path(__file__).parent / "kill_target.py"
STEPS = 24


def start(directory: Path, *extra: str, steps: int = STEPS) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(TARGET), str(directory), str(steps), *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the time of a run on eight devices; the other flags stay."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    monkeypatch.setenv("XLA_FLAGS", flags)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def kill_after(process: subprocess.Popen, directory: Path, step: int) -> None:
    """SIGKILL once the record holds a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        rows = read_metrics(directory / "metrics.jsonl")
        if rows and rows[-1]["step"] >= step:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def exact(directory: Path) -> list[dict]:
    rows = read_metrics(directory / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in rows]


def newest(directory: Path) -> int:
    """The newest complete checkpoint; 0 if the kill came before the first was complete."""
    names = [p.name for p in (directory / "checkpoints").iterdir() if p.name.isdigit()]
    return max(map(int, names), default=0)


def whole(directory: Path, *extra: str, process: subprocess.Popen | None = None) -> list[dict]:
    """Return the rows of an uninterrupted run, which `process` may have begun."""
    finish(process or start(directory, *extra))
    rows = exact(directory)
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in rows if "eval_loss" in r] == [5, 10, 15, 20, 24]
    return rows


def killed_and_resumed(directory: Path, kills: list[int], *extra: str) -> list[dict]:
    """Kill after each of the steps, then while the checkpoint of step 20 is written, then end."""
    resumed_from = None
    for step in kills:
        kill_after(start(directory, *extra), directory, step)
        resumed_from = newest(directory)
    process = start(directory, "--die-while-saving", "20", *extra)
    out, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, err
    assert resumed_from == 0 or f"resumed from step {resumed_from} of {STEPS}" in out
    # Torn (under another name) or, if the disk was faster than the signal, complete.
    assert any(p.name.startswith("20") for p in (directory / "checkpoints").iterdir())
    before = newest(directory)
    assert f"resumed from step {before} of {STEPS}" in finish(start(directory, *extra))
    return exact(directory)


@pytest.mark.daily("all parameters")
@pytest.mark.parametrize("extra", [(), ("--pissa",)], ids=["all parameters", "pissa"])
def test_run_killed_while_saving_continues_bit_for_bit(tmp_path, monkeypatch, extra):
    """Only the killed run is a process; its continuation and the whole run are in this one."""
    steps, options = 10, ("--one-device", *extra)
    dying = ("--die-while-saving", "8", "--phase", "written")
    killed = start(tmp_path / "killed", *dying, *options, steps=steps)

    def run(directory: Path) -> list[dict]:
        monkeypatch.setattr(sys, "argv", [str(TARGET), str(directory), str(steps), *options])
        kill_target.main()
        return exact(directory)

    uninterrupted = run(tmp_path / "whole")
    assert killed.communicate()[0] is not None and killed.returncode == -signal.SIGKILL
    assert newest(tmp_path / "killed") == 4
    assert run(tmp_path / "killed") == uninterrupted
    assert [r["step"] for r in uninterrupted if "loss" in r] == list(range(1, steps + 1))


@pytest.mark.nightly
def test_killed_once_and_while_saving(tmp_path, monkeypatch):
    one_device(monkeypatch)
    kill = random.Random(time.time_ns()).randint(6, 14)
    uninterrupted = start(tmp_path / "whole")
    killed = killed_and_resumed(tmp_path / "killed", [kill])
    assert killed == whole(tmp_path / "whole", process=uninterrupted)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_killed_many_times_on_eight_devices(tmp_path, seed):
    kills = sorted(random.Random(seed).sample(range(5, 20), 3))
    assert killed_and_resumed(tmp_path / "killed", kills) == whole(tmp_path / "whole")


@pytest.mark.nightly
def test_a_reference_that_follows_the_learner_survives_kills(tmp_path, monkeypatch):
    one_device(monkeypatch)
    sync = ("--dpo", "--sync")
    made = killed_and_resumed(tmp_path / "killed", [7, 14], *sync)
    assert made == whole(tmp_path / "whole", *sync)
    assert made != whole(tmp_path / "still", "--dpo"), "or the reference stayed"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("extra", [(), ("--lora",), ("--dpo",)], ids=["sft", "lora", "dpo"])
def test_run_killed_twenty_times_equals_uninterrupted_run(tmp_path, monkeypatch, extra):
    """At random and in each phase of a checkpoint."""
    one_device(monkeypatch)
    killed, chance = tmp_path / "killed", random.Random(7)
    phases = itertools.cycle(("begun", "written", "sealed"))
    for count in range(20):
        reached = newest(killed) if (killed / "checkpoints").is_dir() else 0
        if count % 3 and reached < STEPS - 4:
            after = min(reached + chance.randint(1, 6), STEPS - 2)
            kill_after(start(killed, *extra), killed, after)
            continue
        # The last checkpoint is never to be complete, or there would be nothing left to kill.
        phase = next(phases) if reached < STEPS - 4 else "written"
        step = str(reached + 4)
        process = start(killed, "--die-while-saving", step, "--phase", phase, *extra)
        err = process.communicate(timeout=300)[1]
        assert process.returncode == -signal.SIGKILL, (count, err)
        assert phase == "begun" or newest(killed) == reached
    finish(start(killed, *extra))
    assert exact(killed) == whole(tmp_path / "whole", *extra)


@pytest.mark.nightly
@pytest.mark.parametrize("extra", [(), ("--dpo",)], ids=["sft", "dpo"])
def test_sigterm_saves_and_exits_with_zero(tmp_path, monkeypatch, extra):
    one_device(monkeypatch)
    process = start(tmp_path / "parts", *extra)
    deadline = time.monotonic() + 300
    while not (rows := read_metrics(tmp_path / "parts/metrics.jsonl")) or rows[-1]["step"] < 6:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert "stopped by SIGTERM at step" in out
    reached = newest(tmp_path / "parts")
    assert reached >= 6
    assert f"resumed from step {reached} of {STEPS}" in finish(start(tmp_path / "parts", *extra))
    assert exact(tmp_path / "parts") == whole(tmp_path / "whole", *extra)
