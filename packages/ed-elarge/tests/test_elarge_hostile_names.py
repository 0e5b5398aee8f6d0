"""The scripts and manifests of launchers run `elarge` with its words for every name of a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge.launch import kubernetes, slurm, ssh
from ed_elarge.launch.launched_run import LaunchedRun
from ed_infra.errors import ConfigError

#: A program that writes its words and its folder to a file.
RECORD = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), os.getcwd(), *sys.argv[1:]]) + "\\n")
"""
NAMES = [
    "a b.yaml",
    "$(touch pwned).yaml",
    "`touch pwned`.yaml",
    "a;touch pwned;.yaml",
    "a\ntouch pwned\n.yaml",
    "a\n#SBATCH --wrap=x\n.yaml",
    "a\r\ntouch pwned\r\n.yaml",
    "a') && touch pwned #.yaml",
    'a" && touch pwned #.yaml',
    "-x.yaml",
    "--help.yaml",
    "a\\.yaml",
    "{run}{0}.yaml",
    "%j%A.yaml",
    "*.yaml",
    "~.yaml",
    "#a.yaml",
    "!a.yaml",
    "é\u2028\u0085.yaml",
    "...yaml",
    "1.yaml",
    "null.yaml",
    "x" * 200 + ".yaml",
]


def list_names(part: int) -> list[Any]:
    """Return all names; the default run has a quarter of them for each of four launchers."""
    return [
        pytest.param(name, marks=[] if i % 4 == part else pytest.mark.nightly)
        for i, name in enumerate(NAMES)
    ]


VALUES = ("trainer.name=$(touch pwned)", "trainer.text=a\ntouch pwned\n'\"", "a.b=;touch pwned;")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the programs of launchers by programs that record their words."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("elarge", "scancel", "scontrol"):
        (programs / name).write_text(RECORD)
        (programs / name).chmod(0o755)
    # `srun` runs the words after its option; `ssh` runs its last word with a shell.
    (programs / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    (programs / "ssh").write_text('#!/bin/bash\nexec bash -c "${!#}"\n')
    for name in ("srun", "ssh"):
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record.jsonl"))
    return tmp_path / "record.jsonl"


def launched(tmp_path: Path, name: str, **more: Any) -> LaunchedRun:
    folder = tmp_path / "run $(touch pwned) '; \n"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("model: {}\n")
    return LaunchedRun(name, folder, points=(VALUES,), **more)


def words_of(recorded: Path) -> list[str]:
    """Return the folder and the words of the only program that ran."""
    (line,) = recorded.read_text().splitlines()
    recorded.unlink()
    program, *words = json.loads(line)
    assert program == "elarge"
    return words


def settings() -> list[str]:
    return [word for value in VALUES for word in ("--set", value)]


def names_file(folder: Path, word: str, name: str) -> bool:
    return not word.startswith("-") and (folder / word).resolve() == (folder / name).resolve()


def assert_nothing_else_ran(tmp_path: Path) -> None:
    assert not [*tmp_path.rglob("pwned")]


@pytest.mark.parametrize("name", list_names(0))
def test_slurm_script_runs_only_elarge(tmp_path: Path, recorded: Path, name: str) -> None:
    job = launched(tmp_path, name)
    script = slurm.render(job)
    header = script.partition("\nset -e")[0].splitlines()
    assert all(line.startswith("#SBATCH --") for line in header[1:])
    assert not any(line.startswith("#SBATCH --wrap") for line in header)
    subprocess.run(["bash", "-s"], input=script, text=True, check=True, cwd=tmp_path)
    folder, file, *rest = words_of(recorded)
    assert folder == str(job.directory) and names_file(job.directory, file, name)
    assert rest == settings()
    assert_nothing_else_ran(tmp_path)


@pytest.mark.parametrize("name", list_names(1))
def test_ssh_commands_run_only_elarge(tmp_path: Path, recorded: Path, name: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("host-a\n")
    job = launched(tmp_path, name, hosts=0, options=(("hosts-file", str(hosts)),))
    subprocess.run(["bash", "-s"], input=ssh.render(job), text=True, check=True, cwd=tmp_path)
    folder, file, *rest = words_of(recorded)
    assert folder == str(job.directory) and names_file(job.directory, file, name)
    assert rest == settings()
    assert_nothing_else_ran(tmp_path)


@pytest.mark.parametrize(
    ("name", "ray"),
    [
        pytest.param(*one.values, ray, marks=one.marks)
        for ray in (False, True)
        for one in list_names(2 + ray)
    ],
)
def test_kubernetes_pods_run_only_elarge(
    tmp_path: Path, recorded: Path, name: str, ray: bool
) -> None:
    options = [("image", "a/b:c"), ("directory", str(tmp_path / "work $(touch pwned)"))]
    job = launched(tmp_path, name, options=(*options, *([("ray", "2.9")] if ray else [])))
    (tmp_path / "work $(touch pwned)").mkdir()
    objects = [*yaml.safe_load_all(kubernetes.render(job))]
    assert objects == kubernetes.manifests(job)
    for each in objects:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", each["metadata"]["name"])
    (key,) = objects[0]["data"]
    assert re.fullmatch(r"[-._a-zA-Z0-9]+", key) and not key.startswith("..")
    if ray:
        command = ["bash", "-c", objects[1]["spec"]["entrypoint"]]
    else:
        spec = objects[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        command = spec["containers"][0]["command"]
    subprocess.run(command, check=True, cwd=tmp_path / "work $(touch pwned)")
    _, *words = words_of(recorded)
    assert f"/run-file/{key}" in words
    assert words[-2 * len(VALUES) :] == settings()
    assert_nothing_else_ran(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=x",
        "user@-oProxyCommand=x",
        "a;touch",
        "$(touch)",
        "a`b`",
        "@host",
        "user@",
        "a\\b",
    ],
)
def test_hosts_that_are_options_or_shell_text_are_errors(tmp_path: Path, line: str) -> None:
    (tmp_path / "hosts").write_text(f"good-host\n{line}\n")
    with pytest.raises(ConfigError, match="hosts:2"):
        ssh.read_hosts(tmp_path / "hosts")


def test_usual_hosts_are_read(tmp_path: Path) -> None:
    lines = ["host", "user@host.example.com", "10.0.0.1", "::1", "me_2@fe80::1%eth0", "a-b.c"]
    (tmp_path / "hosts").write_text("\n".join(lines))
    assert ssh.read_hosts(tmp_path / "hosts") == lines
