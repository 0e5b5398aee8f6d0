"""Measure how long training stops: a lost process of an elastic run, and a run that is resumed.

    python -m tools.bench.recovery                   4 processes, 5 lost processes, 3 resumed runs
    python -m tools.bench.recovery --processes 2 --rounds 3

The first table begins with SIGKILL of a random process of an elastic run on this machine. *noticed*
ends when the launcher starts new processes, *connected and built* when they read the copy of the
state in memory, and *first step* with the next row of metrics. The processor time is that of all
new processes until then. The second table begins with the command `elarge` of a run that SIGTERM
stopped, and ends with its next row: with stored train steps, and with jax's cache alone. Programs
are cached by an earlier start.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.bench.measure import command_line, machine, table

ELARGE = str(Path(sys.executable).parent / "elarge")
#: A tiny model and its data on all devices, without the trainer.
MODEL_AND_DATA = """\
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
  tokenizer: {train: {vocab_size: 400}}
sharding: {axis_dims: [1, -1, 1, 1, 1]}
mixture:
  informs: [{type: python, data_files: "pydoc_data.topics:topics"}]
  pack_tokens: true
  pack_seq_length: 64
"""
RUN = f"""\
{MODEL_AND_DATA}\
trainer: {{trainer_type: sft, total_batch_size: 8, max_training_steps: 1000000, log_steps: 1,
  memory_save_steps: 5, learning_rate: 1.0e-5, save_directory: run}}
actions: [train]
"""
STARTED, RESTORED = "processes on the members", "was read from the memory of the hosts"
#: Steps between two losses; the newest copy is then of the present start.
BETWEEN = 15
PATIENCE = 600.0


class Launched:
    """A run in a folder of its own, whose lines are read with the time of their arrival."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str]):
        self._rows = folder / "run/metrics.jsonl"
        self.lines: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self.program = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            self.lines.append((time.monotonic(), line))

    def steps(self) -> int:
        """Return the number of rows of metrics."""
        return self._rows.read_bytes().count(b"\n") if self._rows.exists() else 0

    def moment(self, text: str, after: float) -> float | None:
        """Return when the first line with a text came after a time."""
        return next((at for at, line in [*self.lines] if at > after and text in line), None)

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + PATIENCE
        while not what():
            if self.program.poll() is not None or time.monotonic() > end:
                raise RuntimeError("".join(line for _, line in self.lines[-40:]))
            time.sleep(0.01)

    def end(self) -> None:
        """Let the run save and end."""
        self.program.send_signal(signal.SIGTERM)
        self.program.wait(PATIENCE)


def processes(folder: Path) -> dict[int, int]:
    """Return the processes of an elastic run in a folder, with their members."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = path.joinpath("cmdline").read_bytes().split(b"\0")
            if path.joinpath("cwd").readlink() == folder and b"member" in words:
                found[int(path.name)] = int(_fields(int(path.name))[1])
        except OSError:
            continue
    return {pid: parent for pid, parent in found.items() if parent in found}


def _fields(pid: int) -> list[str]:
    """Return the fields of a process from Linux, without its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of processes."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, _fields(pid)[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def losses(folder: Path, environment: dict[str, str], count: int, rounds: int) -> list[list[float]]:
    """Kill processes of an elastic run; return the seconds of the parts and the processor time."""
    (folder / "run.yaml").write_text(RUN)
    words = [ELARGE, "launch", "run.yaml", "--on", "local", "--elastic", "1"]
    run = Launched([*words, "--processes-per-host", str(count)], folder, environment)
    choose, found = random.Random(0), []
    try:
        for turn in range(rounds + 1):
            before = run.steps()
            run.wait(lambda before=before: run.steps() >= before + BETWEEN)
            steps, killed = run.steps(), time.monotonic()
            os.kill(choose.choice([*processes(folder)]), signal.SIGKILL)
            run.wait(lambda after=killed: run.moment(RESTORED, after) is not None)
            run.wait(lambda steps=steps: run.steps() > steps)
            ended, used = time.monotonic(), processor_seconds(processes(folder))
            started, restored = (run.moment(text, killed) for text in (STARTED, RESTORED))
            assert started is not None
            assert restored is not None
            if turn:  # the first round compiles what it needs
                parts = [started - killed, restored - started, ended - restored]
                found.append([*parts, ended - killed, used])
    finally:
        run.end()
    return found


def resumed(folder: Path, environment: dict[str, str], rounds: int) -> list[list[float]]:
    """Resume a stopped run; return the seconds to its first step, and the processor time."""
    (folder / "run.yaml").write_text(RUN)
    found: list[list[float]] = []
    for turn in range(rounds + 2):
        run = Launched([ELARGE, "run.yaml"], folder, environment)
        steps = run.steps()
        run.wait(lambda steps=steps, run=run: run.steps() > steps)
        used = processor_seconds([run.program.pid])
        if turn > 1:  # the first start trains from scratch, the second one compiles what it needs
            found.append([time.monotonic() - run.began, used])
        run.end()
    return found


def _row(name: str, rounds: list[list[float]]) -> list[str]:
    columns = [*zip(*rounds, strict=True)]
    return [name, *(f"{statistics.median(column):.2f} s" for column in columns)]


def main() -> None:
    """Print both tables."""
    parser = command_line("recovery", __doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"PATH": programs, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    print(machine(), f"load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        environment["XDG_CACHE_HOME"] = str(root / "cache")
        folders = [root / part for part in ("elastic", "steps", "jax")]
        for folder in folders:
            folder.mkdir()
        found = losses(folders[0], environment, given.processes, given.rounds)
        heads = ["", "noticed", "connected and built", "first step", "in all", "processor time"]
        print(table(heads, [_row(f"{given.processes} processes", found)]))
        print(f"longest: {max(row[3] for row in found):.2f} s; load {os.getloadavg()[0]:.1f}")
        alone = {**environment, "JAX_COMPILATION_CACHE_DIR": str(root / "jax-cache")}
        alone["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        rows = [
            _row("stored train steps", resumed(folders[1], environment, given.rounds)),
            _row("jax's cache alone", resumed(folders[2], alone, given.rounds)),
        ]
        print(table(["", "command to first step", "processor time"], rows))


if __name__ == "__main__":
    main()
