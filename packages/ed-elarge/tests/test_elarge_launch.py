"""`elarge launch`: scripts, commands and sweeps, and processes over a program in place of ssh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ed_elarge.command.main import app
from ed_elarge.launch import ssh
from ed_elarge.launch.launched_run import LaunchedRun, parse_options, parse_sweep
from ed_elarge.launch.launchers import LAUNCHERS
from ed_elarge.launch.ray_host import HostProcesses
from ed_infra.errors import ConfigError

RUN = """\
model: {name_or_path: gpt2}
mixture: {informs: [{type: python, data_files: "pydoc_data.topics:topics"}], pack_seq_length: 64}
trainer: {trainer_type: sft, total_batch_size: 8, save_directory: runs/a}
actions: [train]
"""


KUBERNETES = ["--on", "kubernetes", "--option", "image=registry/train:1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("hosts").write_text("# two hosts\nme@first\nsecond  # the other one\n")
    return tmp_path


def launch(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["launch", "run.yaml", *words])
    return int(ended.value.code or 0)


def test_slurm_script_requests_hosts_and_saves_before_the_time_limit(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--on", "slurm", "--hosts", "4", "--setup", "module load cuda"]
    words += ["--option", "time=1:00:00", "--option", "exclusive", "--set", "trainer.seed=3"]
    assert launch(*words, "--dry-run") == 0
    script = capsys.readouterr().out
    for line in ("nodes=4", "ntasks-per-node=1", "requeue", "signal=B:USR1@120", "time=1:00:00"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --exclusive\n" in script
    assert "module load cuda\nrun=(elarge run.yaml --set trainer.seed=3)\n" in script
    assert f"cd {here}\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_sweep_is_an_array_whose_runs_have_their_own_folders(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--on", "slurm", "--sweep", "trainer.learning_rate=1e-5,1e-4"]
    assert launch(*words, "--sweep", "trainer.seed=1,2", "--dry-run") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-3\n" in script
    assert (
        "  2) run=(elarge run.yaml --set trainer.learning_rate=1e-4 --set trainer.seed=1 "
        "--set trainer.save_directory=runs/a/sweep-2) ;;\n"
    ) in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--on", "lsf"],
            r"unknown launcher of --on 'lsf' \(known: kubernetes, local, ray, slurm, ssh\)",
        ),
        (["--on", "slurm", "--sweep", "trainer.seed="], "must be KEY=VALUE,VALUE"),
        (["--on", "slurm", "--sweep", "trainer.sed=1,2"], "did you mean 'seed'"),
        (["--on", "slurm", "--option", "=3"], "must be NAME=VALUE"),
        (["--on", "ray", "--option", "restart=1"], "restart must be one of address, resource,"),
        (["--on", "ray", "--option", "gpu=two"], "gpu=two must end with a number from 0"),
        (["--on", "ray", "--option", "resource=slice"], "must be resource=NAME:AMOUNT"),
        (["--on", "ssh"], "--option hosts-file=FILE"),
        (["--on", "ssh", "--option", "hosts-file=none"], "none cannot be read"),
        (["--on", "ssh", "--option", "hosts-file=hosts", "--hosts", "3"], r"lists \(2\)"),
        (["--on", "ssh", "--option", "hosts-file=hosts", "--option", "port=0"], "from 1 to 65535"),
        (["--on", "local", "--option", "port=1"], "--on local has no options"),
        (["--on", "local", "--hosts", "2"], "--processes-per-host sets the number"),
        (["--on", "slurm", "--elastic", "1"], "not possible with --on slurm: use local, ssh"),
        (["--on", "local", "--elastic", "2"], r"more than the run has processes \(1\)"),
        (["--on", "kubernetes"], "needs an image: --option image="),
        ([*KUBERNETES, "--option", "clam=data"], "did you mean 'claim'"),
        ([*KUBERNETES, "--processes-per-host", "2"], "a pod runs one process"),
        ([*KUBERNETES, "--option", "gpu=none"], "gpu=none must be a whole number of at least 1"),
        ([*KUBERNETES, "--option", "tpu=v5e:4x4", "--hosts", "3"], "a slice v5e:4x4 has 4 hosts"),
        ([*KUBERNETES, "--option", "slices=2"], "add --option tpu="),
    ],
)
def test_invalid_launch_names_the_value_and_the_constraint(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert launch(*words, "--dry-run") == 2
    assert re.search(message, capsys.readouterr().err)


def test_pods_have_their_numbers_devices_and_the_run_file(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*KUBERNETES, "--hosts", "4", "--option", "gpu=8", "--option", "claim=data"]
    assert launch(*words, "--set", "trainer.seed=3", "--setup", "date", "--dry-run") == 0
    file, job_set = yaml.safe_load_all(capsys.readouterr().out)
    assert file["data"] == {"run.yaml": RUN}
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    [container] = job["template"]["spec"]["containers"]
    script = "set -e\ndate\nexec elarge /run-file/run.yaml --set trainer.seed=3"
    assert container["command"] == ["bash", "-c", script]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables == {
        "ELARGE_STOPPED_EXIT_CODE": "75",
        "JAX_COORDINATOR_ADDRESS": "run-hosts-0-0.run:8476",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": None,  # the number of the pod in its job
    }


def test_run_that_only_serves_is_a_deployment_that_listens_to_other_pods(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text("model: {name_or_path: gpt2}\nactions: [serve]\n")
    assert launch(*KUBERNETES, "--dry-run") == 2
    assert "serve: {host: 0.0.0.0, port: 8000}" in capsys.readouterr().err
    actions = "actions: [{serve: {host: 0.0.0.0, port: 8000}}]\n"
    Path("run.yaml").write_text("model: {name_or_path: gpt2}\n" + actions)
    assert launch(*KUBERNETES, "--option", "max-replicas=3", "--dry-run") == 0
    _, deployment, service, autoscaler = yaml.safe_load_all(capsys.readouterr().out)
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")]
    assert probes == ["/health/ready", "/health/live"]
    assert service["spec"]["ports"][0]["port"] == 8000
    assert autoscaler["spec"]["maxReplicas"] == 3


def test_sweep_has_at_most_a_thousand_runs() -> None:
    values = ",".join(map(str, range(40)))
    with pytest.raises(ConfigError, match="has 1600 runs; the largest number is 1000"):
        parse_sweep((), [f"a={values}", f"b={values}"], "runs")


def test_ssh_processes_share_one_coordinator(here: Path) -> None:
    options = parse_options(["hosts-file=hosts", "port=9000", "IdentityFile=key"])
    job = LaunchedRun("run.yaml", here, hosts=0, processes=2, options=options)
    planned = ssh.processes(job)
    assert [process.host for process in planned] == ["me@first", "me@first", "second", "second"]
    for number, process in enumerate(planned):
        assert process.words[:6] == ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "IdentityFile=key")
        command = process.words[-1]
        assert "JAX_COORDINATOR_ADDRESS=first:9000" in command
        assert f"JAX_NUM_PROCESSES=4 && export JAX_PROCESS_ID={number} " in command
        assert command.endswith("exec elarge run.yaml")
    assert len(LAUNCHERS["ssh"].render(job).splitlines()) == 4


def test_members_of_an_elastic_run_have_one_name_per_launch_and_no_terminal(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--on", "ssh", "--option", "hosts-file=hosts", "--elastic", "1", "--setup", "date"]
    assert launch(*words, "--set", "trainer.seed=3", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    command = r"exec elarge member (\w{16})/(\d) run.yaml --set trainer.seed=3'$"
    found = [re.search(command, line) for line in lines]
    assert all(line.startswith("ssh -T -o BatchMode=yes ") for line in lines)
    assert [match and match[2] for match in found] == ["0", "1"]
    assert len({match and match[1] for match in found}) == 1


def test_ray_placement_has_one_bundle_per_host_and_numbered_processes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--on", "ray", "--hosts", "2", "--processes-per-host", "2", "--setup", "true"]
    for option in ("tpu=4", "cpu=8", "resource=my-slice:1", "restarts=5"):
        words += ["--option", option]
    assert launch(*words, "--sweep", "trainer.seed=1,2", "--dry-run") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["strategy"] == "STRICT_SPREAD" and shown["restarts"] == 5
    assert shown["bundles"] == [{"CPU": 8, "TPU": 4, "my-slice": 1}] * 2
    assert [[host["bundle"] for host in run] for run in shown["runs"]] == [[0, 1]] * 2
    commands = [command for host in shown["runs"][1] for command in host["commands"]]
    for number, command in enumerate(commands):
        assert command.startswith(f"cd {here} && true && export JAX_COORDINATOR_ADDRESS=")
        assert f"JAX_NUM_PROCESSES=4 && export JAX_PROCESS_ID={number} " in command
        assert "exec elarge run.yaml --set trainer.seed=2 --set" in command


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_failed_process_stops_the_others_and_decides_the_exit_code(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = here / "tools"
    tools.mkdir()
    program(tools / "ssh", 'for word; do last="$word"; done; exec sh -c "$last"')
    program(
        tools / "elarge",
        'echo "number $JAX_PROCESS_ID"; [ "$JAX_PROCESS_ID" = 1 ] && exit 3; exec sleep 600',
    )
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert launch("--on", "ssh", "--option", "hosts-file=hosts") == 3
    out = capsys.readouterr().out
    assert "[second] number 1\n" in out


@pytest.mark.nightly
def test_local_processes_use_the_interpreter_of_the_launcher(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "jax.py").write_text(
        "raise RuntimeError('a module of the run replaces an installed one')"
    )
    program(here / "elarge", "exit 9")
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}/usr/bin{os.pathsep}/bin")
    model = "{config: {model_type: llama}, tokenizer: gpt2/gpt2}"
    Path("run.yaml").write_text(f"model: {model}\nactions: [validate]\n")
    assert launch("--on", "local") == 0
    assert "[0] the configuration is valid\n" in capfd.readouterr().out
    Path("run.yaml").write_text(RUN)
    for words in ([], ["--elastic", "1"]):
        assert launch("--on", "local", *words, "--dry-run") == 0
        assert f"exec {sys.executable} -P -m ed_elarge " in capfd.readouterr().out


def test_elastic_run_whose_hosts_lack_the_program_ends_at_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = here / "tools"
    tools.mkdir()
    program(tools / "ssh", 'for word; do last="$word"; done; exec sh -c "$last"')
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin")
    # A connection that is lost otherwise is made again after this time.
    monkeypatch.setattr("ed_elarge.launch.elastic._WAIT", 3600.0)
    words = ["--on", "ssh", "--option", "hosts-file=hosts", "--elastic", "2"]
    assert launch(*words) == 127
    assert "cannot start elarge: install the program" in capsys.readouterr().err


def test_ray_host_finds_programs_next_to_its_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", f"/usr/bin{os.pathsep}/bin")
    host = HostProcesses()
    host.begin(["echo $PATH"])
    lines: list[str] = []
    codes: list[int | None] = [None]
    while codes == [None]:
        more, codes = host.poll(1.0)
        lines += [line for _, line in more]
    assert lines[0].startswith(str(Path(sys.executable).parent))


@pytest.mark.nightly
def test_failure_in_one_of_several_processes_ends_the_process_immediately() -> None:
    code = (
        "import atexit, time, jax, ed_elarge.command.main as m; "
        "jax.distributed.is_initialized = lambda: True; "
        "atexit.register(time.sleep, 600); "  # in place of jax's wait for the other processes
        "m.app = lambda **given: 1 / 0; m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
