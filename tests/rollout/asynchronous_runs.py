"""Runs of `elarge` with processes of engines and environments, for tests that kill them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ed_trainers.figures.metrics import CLOCKED
from ed_trainers.online.sample_ledger import SampleLedger

EXAMPLES = Path(__file__).parents[2] / "examples"
ELARGE = Path(sys.executable).with_name("elarge")
STEPS, PROMPTS, COPIES = 8, 4, 4
RUN = f"""
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}}
  tokenizer: {{train: {{vocab_size: 300}}}}
sharding: {{axis_dims: [1, 1, 1, 1, 1]}}
mixture:
  informs: [{{data_files: {EXAMPLES}/data/answers.jsonl, content_field: prompt}}]
trainer:
  trainer_type: grpo
  reward_functions: [{{regex: {{pattern: "[0-9]"}}}}]
  num_return_sequences: {COPIES}
  max_prompt_length: 12
  max_completion_length: 24
  max_training_steps: {STEPS}
  total_batch_size: {PROMPTS * COPIES}
  learning_rate: 1e-2
  log_steps: 1
  save_steps: 2
  save_directory: run
  use_tensorboard: false
actions: [train]
"""


def write(folder: Path, more: str = "", text: str = RUN) -> Path:
    """Write a run file into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(text + more)
    return folder


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the run of a folder."""
    log = (folder / "log").open("ab")
    return subprocess.Popen([ELARGE, "run.yaml"], cwd=folder, stdout=log, stderr=log)


def finish(folder: Path) -> list[dict[str, Any]]:
    """Run to the end, and return the rows of the steps without times."""
    process = start(folder)
    assert process.wait(3600) == 0, (folder / "log").read_text()[-3000:]
    return steps(folder)


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps without figures that depend on time or on the waiting."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "loss" in row]
    left = {"tokens_per_second", "time", *CLOCKED}
    return [
        {
            name: value
            for name, value in row.items()
            if name not in left and not name.startswith(("rollout_", "staleness/"))
        }
        for row in found
    ]


def children(pid: int) -> dict[int, str]:
    """Return the worker processes of a trainer: process id -> role."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            parent = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == pid and b"--as" in words:
            found[int(name)] = words[words.index(b"--as") + 1].decode()
    return found


def run_with_kills(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Run to the end, and kill random processes meanwhile; return the number of kills by role.

    A trainer that was killed is started again. If the run ends before all kills, fewer are made.
    """
    draw, counts = random.Random(seed), dict[str, int]()
    process = start(folder)
    while sum(counts.values()) < kills and process.poll() is None:
        role = draw.choice(["trainer", "engine", "environment", "all"])
        time.sleep(draw.uniform(0.2, 10.0))
        limit = time.monotonic() + 60.0
        while role not in ("trainer", *(workers := children(process.pid)).values()):
            if process.poll() is not None or time.monotonic() > limit:
                break
            if role == "all" and set(workers.values()) == {"engine", "environment"}:
                break
            time.sleep(0.1)
        if process.poll() is not None:
            break
        trainer = (process.pid, "trainer")
        if role == "trainer":
            chosen = [trainer]
        elif role == "all":  # as when a host or a container is killed
            chosen = [trainer, *workers.items()]
        else:
            found = [each for each in workers.items() if each[1] == role]
            chosen = [draw.choice(found)] if found else [trainer]
        for pid, role in chosen:
            with suppress(ProcessLookupError):  # a worker ends after its trainer
                os.kill(pid, signal.SIGKILL)
            counts[role] = counts.get(role, 0) + 1
        if chosen[0][1] == "trainer":
            process.wait()
            process = start(folder)
    assert process.wait(3600) == 0, (folder / "log").read_text()[-3000:]
    return counts


def check_ledger(folder: Path, generations: int = STEPS) -> list[int]:
    """Check that every prompt was used exactly once, in the order of issue.

    Returns:
        The number of tokens of each used sample.
    """
    ledger = SampleLedger(folder / "run" / "samples.ledger", {})
    kinds: dict[str, list[tuple[int, int]]] = {}
    used: list[int] = []
    for kind, number, content in ledger.records():
        kinds.setdefault(kind, []).append((number, content.get("place", 0)))
        if kind == "consumed":
            assert content["step"] == number
            used.append(number)
    samples = [
        (number, place) for number in range(generations) for place in range(PROMPTS * COPIES)
    ]
    assert used == list(range(generations)), "each generation is used once, in order"
    assert sorted(kinds["issued"]) == [(number, 0) for number in range(generations)]
    assert sorted(kinds["finished"]) == samples
    assert sorted(kinds["scored"]) == samples
    lengths = [len(ledger.sample(key).token_ids) for key in samples]
    for key in samples:
        sample = ledger.sample(key)
        sampled = len(sample.token_ids) - sum(count for _, count in sample.given)
        assert sum(count for _, count in sample.versions) == sampled
    ledger.close()
    return lengths
