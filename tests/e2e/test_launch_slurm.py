"""`elarge launch` with a real SLURM controller on this machine (Debian: slurm-wlm, munge)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.snippets.pages import create_environment, executed_by
from tools.workspace import ROOT

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (os.geteuid() == 0 and all(map(shutil.which, ("slurmctld", "slurmd", "munged")))),
        reason="needs root and Debian's packages slurm-wlm and munge",
    ),
]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmUser=root
SlurmctldPort={controller}
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node.log
KillWait=60
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs=2
PartitionName=all Nodes=localhost Default=YES State=UP MaxTime=INFINITE
"""

RUN = """\
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
  tokenizer: {train: {vocab_size: 400}}
mixture:
  informs: [{type: python, data_files: "pydoc_data.topics:topics"}]
  pack_tokens: true
  pack_seq_length: 64
trainer: {trainer_type: sft, total_batch_size: 4, max_training_steps: 60, log_steps: 1,
  save_steps: 20, save_directory: runs/slurm}
actions: [train]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A controller and a node; yields the environment of the commands."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("spool", "state"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=os.uname().nodename, folder=folder, controller=free_port(), node=free_port()
        )
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    munge = ["--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed")]
    programs = [["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]]
    running = []
    try:
        for words in programs:
            with (folder / f"{words[0]}.out").open("w") as log:
                running.append(
                    subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
                )
            time.sleep(1)
        wait(lambda: "idle" in output(environment, "sinfo", "--noheader"), 60)
        yield environment
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def output(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


def wait(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not hold within {seconds} s"
        time.sleep(1)


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_queued_again_run_of_two_processes_equals_a_run_of_one(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    programs = Path(sys.executable).parent
    elarge = str(programs / "elarge")
    setup = f"export PATH={programs}:$PATH XLA_FLAGS="
    words = [elarge, "launch", "run.yaml", "--on", "slurm", "--processes-per-host", "2"]
    submitted = subprocess.run(
        [*words, "--setup", setup], cwd=tmp_path, env=cluster, capture_output=True, text=True
    )
    number = submitted.stdout.split()[-1]
    assert number.isdigit(), submitted.stdout + submitted.stderr
    logs = tmp_path / f"run-slurm-{number}.log"

    def lines() -> str:
        return logs.read_text() if logs.exists() else ""

    wait(lambda: len(losses(tmp_path / "runs/slurm")) > 5, 600)
    # The signal that SLURM sends before the time limit.
    output(cluster, "scancel", "--batch", "--signal=USR1", number)
    wait(lambda: "the job is queued again" in lines(), 120)
    # SLURM delays a job that is queued again; remove the delay.
    wait(lambda: "PENDING" in output(cluster, "squeue", "-h", "-o", "%T"), 60)
    output(cluster, "scontrol", "update", f"JobId={number}", "StartTime=now")
    wait(lambda: not output(cluster, "squeue", "--noheader"), 600)
    assert "Rank 1 is connected to 1 peer ranks" in lines() and "resumed from step" in lines()

    alone = ["run.yaml", "--set", "trainer.save_directory=runs/alone"]
    one = {**cluster, "XLA_FLAGS": ""}
    subprocess.run([elarge, *alone], cwd=tmp_path, env=one, check=True, capture_output=True)
    expected, found = losses(tmp_path / "runs/alone"), losses(tmp_path / "runs/slurm")
    assert [*found] == [*expected] == [*range(1, 61)]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-6)


def test_commands_of_the_page_train_a_run_and_a_sweep(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    (block,) = executed_by("test_launch_slurm.py", ROOT / "docs/tasks/slurm.md")
    (tmp_path / "run.yaml").write_text(
        RUN.replace("max_training_steps: 60", "max_training_steps: 3")
    )
    create_environment(tmp_path)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**cluster, "PATH": programs}
    shown = subprocess.run(
        ["bash", "-ec", block.body], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("Submitted batch job") == 2
    wait(lambda: not output(cluster, "squeue", "--noheader"), 900)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    for run in ("", "/sweep-0", "/sweep-1"):
        assert [*losses(tmp_path / f"runs/slurm{run}")] == [1, 2, 3], logs
        assert (tmp_path / f"runs/slurm{run}/model").is_dir()
