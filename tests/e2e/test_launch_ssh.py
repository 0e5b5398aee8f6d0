"""`elarge launch --on ssh` with a real sshd on this machine (Debian: openssh-server)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.snippets.pages import create_environment, executed_by
from tools.bench.recovery import MODEL_AND_DATA
from tools.workspace import ROOT

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (Path(SSHD).exists() and Path("/proc").is_dir()),
        reason="needs Debian's package openssh-server",
    ),
]

#: Two names of this machine, as the two hosts of a run.
HOSTS = "127.0.0.1\nlocalhost\n"
SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
"""
CLIENT = """\
Host *
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
RUN = f"""\
{MODEL_AND_DATA}\
trainer: {{trainer_type: sft, total_batch_size: 4, max_training_steps: STEPS, log_steps: 1,
  memory_save_steps: 5, learning_rate: 1.0e-5, save_directory: runs/ssh}}
actions: [train]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An sshd, and the variables with which `ssh` connects to it."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    (folder / "sshd_config").write_text(SERVER.format(folder=folder, port=port))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder, port=port))
    program = folder / "ssh"
    program.write_text(f'#!/bin/bash\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    program.chmod(0o700)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires the folder if root starts it
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    programs = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    try:
        end = time.monotonic() + 30
        while "Server listening" not in (folder / "log").read_text():
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.1)
        yield {**os.environ, "PATH": os.pathsep.join(programs)}
    finally:
        server.terminate()
        server.wait(30)


def prepare(folder: Path, steps: int) -> str:
    """Write the files that the page names; return its two commands."""
    (folder / "run.yaml").write_text(RUN.replace("STEPS", str(steps)))
    (folder / "hosts.txt").write_text(HOSTS)
    create_environment(folder)
    plain, elastic = executed_by("test_launch_ssh.py", ROOT / "docs/tasks/ssh.md")
    return plain.body, elastic.body


def losses(folder: Path) -> dict[int, float]:
    path = folder / "runs/ssh/metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def one_process(folder: Path, steps: int) -> dict[int, float]:
    """The losses of one process with two devices."""
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN.replace("STEPS", str(steps)))
    two = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    elarge = str(Path(sys.executable).parent / "elarge")
    subprocess.run([elarge, "run.yaml"], cwd=folder, env=two, check=True, capture_output=True)
    return losses(folder)


def test_command_of_the_page_trains_on_two_hosts_as_one_process_does(
    environment: dict[str, str], tmp_path: Path
) -> None:
    plain, _ = prepare(tmp_path, 20)
    done = subprocess.run(
        ["bash", "-ec", plain], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[127.0.0.1] " in done.stdout
    assert losses(tmp_path) == pytest.approx(one_process(tmp_path / "alone", 20), rel=1e-6)


def test_elastic_command_of_the_page_survives_the_end_of_a_connection(
    environment: dict[str, str], tmp_path: Path
) -> None:
    _, elastic = prepare(tmp_path, 400)
    log = tmp_path / "launch.log"
    with log.open("w") as out:
        launch = subprocess.Popen(
            ["bash", "-ec", f"exec {elastic}"],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=out,
        )
    try:
        end = time.monotonic() + 600
        while len(losses(tmp_path)) < 40:
            assert launch.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        children = Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text().split()
        command = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        (lost,) = [pid for pid, words in command.items() if b"localhost" in words]
        os.kill(int(lost), signal.SIGKILL)
        assert launch.wait(900) == 0, log.read_text()
    finally:
        if launch.poll() is None:
            launch.kill()
            launch.wait()
    assert log.read_text().count(" processes on") >= 2
    assert losses(tmp_path) == pytest.approx(one_process(tmp_path / "alone", 400), rel=1e-6)
