"""The script that builds the images trains and serves through the commands that it gives to Docker.

A program named `docker` stands for Docker: it executes the commands of the images on this machine,
and refuses every other command.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ed_elarge.launch.host_process import free_port

from tools import containers
from tools.containers import ROOT

DOCKER = """#!{python}
import json, os, signal, subprocess, sys
from pathlib import Path
words, state = sys.argv[1:], Path(__file__).with_name("state")
if words[0] == "build":
    assert Path(words[words.index("-f") + 1]).is_file() and words[-1] == "."
elif words[:2] == ["run", "--rm"]:
    image = words.index("easydel-train")
    folder, inside = words[words.index("-v") + 1].split(":")
    assert inside == "/workspace"
    sys.exit(subprocess.run(words[image + 1 :], cwd=folder).returncode)
elif words[:2] == ["run", "-d"]:
    image = words.index("easydel-serve")
    folder, inside, _ = words[words.index("-v") + 1].split(":")
    text = Path("docker/serve.Dockerfile").read_text().split("ENTRYPOINT ")[1]
    command = [*json.loads(text), *words[image + 1 :]]
    command = [folder if word == inside else word for word in command]
    command = [{port!r} if word == "8000" else word for word in command]
    with open(os.devnull, "w") as nothing:
        server = subprocess.Popen(command, stdout=nothing, stderr=nothing, start_new_session=True)
    state.write_text(str(server.pid))
    print("container")
elif words == ["port", "container", "8000"]:
    print("127.0.0.1:" + {port!r})
elif words == ["stop", "container"]:
    os.kill(int(state.read_text()), signal.SIGTERM)
else:
    sys.exit("unknown command: " + " ".join(words))
"""


def install_docker(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    program = folder / "docker"
    program.write_text(DOCKER.format(python=sys.executable, port=str(port)))
    program.chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)


@pytest.mark.nightly
def test_images_train_and_serve_a_tiny_model(tmp_path, monkeypatch, capfd):
    install_docker(tmp_path / "bin", free_port("127.0.0.1"), monkeypatch)
    assert containers.main([]) == 0
    assert "the image serve answered: '" in capfd.readouterr().out


def test_command_without_docker_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert containers.main([]) == 1
    assert "docker is not installed" in capsys.readouterr().err


@pytest.mark.nightly
def test_hadolint_accepts_the_dockerfiles_and_finds_a_fault(tmp_path):
    script = (ROOT / ".ci/run").read_text()
    (command,) = re.findall(r"^(uv tool run .*hadolint.*Dockerfile) \|\|", script, re.M)
    done = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True)
    if "Failed to fetch" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "docker").mkdir()
    fault = "FROM python:latest\nRUN cd /tmp && sudo apt-get install gcc\n"
    (tmp_path / "docker/train.Dockerfile").write_text(fault)
    done = subprocess.run(command, cwd=tmp_path, shell=True, capture_output=True, text=True)
    assert done.returncode == 1 and "DL3007" in done.stdout
