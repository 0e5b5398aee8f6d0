"""`elarge launch --on ray` on a cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.snippets.pages import executed_by
from tools.bench.recovery import MODEL_AND_DATA
from tools.workspace import ROOT

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc"),
]

RUN = f"""\
{MODEL_AND_DATA}\
trainer: {{trainer_type: sft, total_batch_size: 4, max_training_steps: 80, log_steps: 1,
  save_steps: 20, save_directory: runs/ray}}
actions: [train]
"""
#: Online training: the samples of each step come from the engine of the run.
GRPO = (
    RUN.partition("mixture:")[0]
    + f"""\
mixture:
  informs: [{{data_files: {ROOT}/examples/data/answers.jsonl, content_field: prompt}}]
trainer: {{trainer_type: grpo, reward_functions: [{{regex: {{pattern: "[0-9]"}}}}],
  num_return_sequences: 4, max_prompt_length: 12, max_completion_length: 24, total_batch_size: 16,
  max_training_steps: 14, learning_rate: 1e-2, log_steps: 1, save_steps: 4,
  save_directory: runs/ray}}
actions: [train]
"""
)
ELARGE = str(Path(sys.executable).parent / "elarge")


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """Two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small)
    try:
        made.add_node(num_cpus=1, object_store_memory=100_000_000)
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process with two devices."""
    return losses_of_one_process(tmp_path_factory.mktemp("alone"), RUN, devices=2)


def losses_of_one_process(folder: Path, run: str, devices: int) -> dict[int, float]:
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(run)
    one = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    subprocess.run([ELARGE, "run.yaml"], cwd=folder, env=one, check=True, capture_output=True)
    return losses(folder / "runs/ray")


def add_nodes(cluster, count: int) -> None:
    """Add nodes of one CPU until the cluster has `count` nodes."""
    while len(cluster.list_all_nodes()) < count:
        cluster.add_node(num_cpus=1, object_store_memory=100_000_000)


class Launch:
    """A launch in the background."""

    def __init__(self, cluster, folder: Path, *words: str, run: str = RUN, hosts: int = 2) -> None:
        self.folder = folder
        (folder / "run.yaml").write_text(run)
        self.log = folder / "launch.log"
        setup = f"export PATH={Path(sys.executable).parent}:$PATH XLA_FLAGS="
        given = [ELARGE, "launch", "run.yaml", "--on", "ray", "--setup", setup]
        given += ["--option", f"address={cluster.address}", "--option", "wait=120"]
        given += ["--hosts", str(hosts), *words]
        with self.log.open("a") as out:
            self.process = subprocess.Popen(given, cwd=folder, stdout=out, stderr=out)

    def lines(self) -> str:
        return self.log.read_text()

    def reach(self, step: int) -> None:
        end = time.monotonic() + 600
        while len(losses(self.folder / "runs/ray")) < step:
            assert self.process.poll() is None, self.lines()
            assert time.monotonic() < end, self.lines()
            time.sleep(0.1)

    def processes(self) -> dict[int, int]:
        """Return the ids of the running processes by their number in the run."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if path.joinpath("cwd").readlink() != self.folder:
                    continue
                pairs = path.joinpath("environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            number = dict(pair.partition("=")[::2] for pair in pairs).get("JAX_PROCESS_ID")
            if number is not None:
                found.setdefault(int(number), int(path.name))
        return found

    def lose_node(self, cluster) -> None:
        """Kill a node of this run other than the head, and add another node to the cluster."""
        raylets = {
            node.all_processes["raylet"][0].process.pid: node
            for node in cluster.list_all_nodes()
            if not node.head
        }
        used = [
            raylets[pid]
            for process in self.processes().values()
            for pid in ancestors(process)
            if pid in raylets
        ]
        cluster.remove_node(used[0], allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=100_000_000)

    def end(self, code: int = 0) -> None:
        assert self.process.wait(900) == code, self.lines()


def ancestors(pid: int) -> Iterator[int]:
    """Yield the processes above a process."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def check_same(folder: Path, expected: dict[int, float]) -> None:
    found = losses(folder / "runs/ray")
    assert [*found] == [*expected] == [*range(1, 81)]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-6)


def test_run_with_a_killed_process_on_two_nodes_equals_a_run_of_one_process(
    cluster, expected: dict[int, float], tmp_path: Path
) -> None:
    launch = Launch(cluster, tmp_path)
    launch.reach(45)  # the checkpoint of step 20 is complete, as it is written in the background
    os.kill(launch.processes()[1], signal.SIGKILL)
    launch.end()
    lines = launch.lines()
    assert "process 1 on" in lines and "was killed by signal 9" in lines
    assert "/0] resumed from step" in lines
    check_same(tmp_path, expected)
    assert not launch.processes()


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("run", [pytest.param(RUN, id="sft"), pytest.param(GRPO, id="grpo")])
def test_run_that_loses_a_node_equals_a_run_of_one_process(
    cluster, tmp_path: Path, run: str, nodes: int, record_property
) -> None:
    expected = losses_of_one_process(tmp_path / "alone", run, nodes)
    add_nodes(cluster, nodes)
    folder = tmp_path / "ray"
    folder.mkdir()
    launch = Launch(cluster, folder, run=run, hosts=nodes)
    launch.reach(len(expected) // 2)
    launch.lose_node(cluster)
    launch.end()
    assert "the run starts again from its checkpoint" in launch.lines()
    found = losses(folder / "runs/ray")
    assert [*found] == [*expected]
    worst = max(abs(found[step] - loss) for step, loss in expected.items())
    record_property("difference", worst)
    assert worst <= 1e-6 * max(1.0, *map(abs, expected.values()))


def test_run_continues_after_an_interrupt_and_after_the_loss_of_a_node(
    cluster, expected: dict[int, float], tmp_path: Path
) -> None:
    launch = Launch(cluster, tmp_path)
    launch.reach(5)
    launch.process.send_signal(signal.SIGINT)
    launch.end()
    assert "/0] stopped by " in launch.lines()
    assert 5 <= len(losses(tmp_path / "runs/ray")) < 80

    launch = Launch(cluster, tmp_path)
    launch.reach(45)
    launch.lose_node(cluster)
    launch.end()
    assert "the run starts again from its checkpoint" in launch.lines()
    check_same(tmp_path, expected)


def test_block_of_the_documentation_starts_ray_and_trains(tmp_path: Path) -> None:
    (block,) = executed_by("test_launch_ray.py", ROOT / "docs/tasks/ray.md")
    (tmp_path / "run.yaml").write_text(
        RUN.replace("max_training_steps: 80", "max_training_steps: 3")
    )
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "XLA_FLAGS": ""}
    shell = subprocess.Popen(
        ["bash", "-ec", block.body], cwd=tmp_path, env=environment, start_new_session=True
    )
    try:
        assert shell.wait(900) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    assert (tmp_path / "runs/ray/model").is_dir()


def test_failures_beyond_the_restarts_name_the_host_and_the_exit_code(
    cluster, tmp_path: Path
) -> None:
    launch = Launch(cluster, tmp_path, "--option", "restarts=1", "--setup", "exit 7")
    launch.end(7)
    lines = launch.lines()
    assert "ended with exit code 7" in lines
    assert "started again 1 times (--option restarts=1)" in lines
