"""Manifests of `elarge launch --on kubernetes`: published schemas, and the started processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ed_elarge.launch import kubernetes
from ed_elarge.launch.launched_run import LaunchedRun, parse_options

from tests.snippets.pages import executed_by
from tools.workspace import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

#: A Python with `kubernetes-validate` and `kubeflow-trainer-api`.
PYTHON = os.environ.get("EASYDEL_CLIENTS_PYTHON", "")

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
  save_steps: 20, save_directory: runs/kubernetes}
actions: [train]
"""

#: Validates all documents. The models of JobSet drop unknown keys, so they are compared afterwards.
VALIDATE = """\
import sys
import kubernetes_validate, yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

for document in yaml.safe_load_all(sys.stdin):
    if document["kind"] == "JobSet":
        assert JobsetV1alpha2JobSet.from_dict(document).to_dict() == document
        for replicated in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
            job["spec"] = replicated["template"]["spec"]
            kubernetes_validate.validate(job, "1.31", strict=True)
    else:
        kubernetes_validate.validate(document, "1.31", strict=True)
    print(document["kind"])
"""


def launched(folder: Path, *options: str, **fields: Any) -> LaunchedRun:
    (folder / "run.yaml").write_text(RUN)
    image = ("image=registry/train:1", *options)
    return LaunchedRun("run.yaml", folder, options=parse_options(image), **fields)


@pytest.mark.skipif(not PYTHON, reason="needs EASYDEL_CLIENTS_PYTHON")
@pytest.mark.parametrize(
    ("options", "fields", "kinds"),
    [
        ([], {}, ["JobSet"]),
        (["gpu=8", "cpu=16", "memory=64Gi", "claim=data"], {"hosts": 4}, ["JobSet"]),
        (["tpu=v5e:4x4", "slices=2", "queue=team", "restarts=0"], {"hosts": 0}, ["JobSet"]),
        (["secret=keys", "service-account=me"], {"points": (("a=1",), ("a=2",))}, ["JobSet"] * 2),
        (["replicas=2"], {"server": ("0.0.0.0", 8000)}, ["Deployment", "Service"]),
        (
            ["max-replicas=3", "tpu=v6e:2x4"],
            {"server": ("0.0.0.0", 8000)},
            ["Deployment", "Service", "HorizontalPodAutoscaler"],
        ),
    ],
)
def test_manifests_are_valid_by_the_published_schemas(
    tmp_path: Path, options: list[str], fields: dict[str, Any], kinds: list[str]
) -> None:
    text = kubernetes.render(launched(tmp_path, *options, **fields))
    done = subprocess.run(
        [PYTHON, "-c", VALIDATE], input=text, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ConfigMap", *kinds]


#: The definition of RayJob: `ray-operator/config/crd/bases/ray.io_rayjobs.yaml` of KubeRay.
RAY_JOB = os.environ.get("EASYDEL_RAYJOB_CRD", "")


def strict(schema: Any) -> Any:
    """Return a schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if "properties" in made and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


@pytest.mark.skipif(not RAY_JOB, reason="needs EASYDEL_RAYJOB_CRD")
@pytest.mark.parametrize(
    ("options", "hosts", "group"),
    [
        (["ray=2.60.0"], 2, (2, 1)),
        (["ray=2.60.0", "gpu=8", "cpu=16", "memory=64Gi", "claim=data", "queue=team"], 4, (4, 1)),
        (["ray=2.60.0", "tpu=v5e:4x4", "slices=2", "secret=keys"], 0, (2, 4)),
    ],
)
def test_ray_jobs_are_valid_by_the_definition_of_kuberay(
    tmp_path: Path, options: list[str], hosts: int, group: tuple[int, int]
) -> None:
    versions = yaml.safe_load(Path(RAY_JOB).read_text())["spec"]["versions"]
    [schema] = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1"]
    schema["properties"]["metadata"] = {}
    job = launched(tmp_path, *options, hosts=hosts, setup=("export A=1",))
    file, ray_job = yaml.safe_load_all(kubernetes.render(job))
    assert (file["kind"], ray_job["kind"]) == ("ConfigMap", "RayJob")
    checker = jsonschema.Draft202012Validator(strict(schema))
    assert [error.message for error in checker.iter_errors(ray_job)] == []
    [workers] = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["numOfHosts"]) == group
    ray_job["spec"]["entrypont"] = ""
    assert [*checker.iter_errors(ray_job)]


def test_entry_point_of_a_ray_job_prints_a_placement_for_all_hosts(tmp_path: Path) -> None:
    options = ("ray=2.60.0", "gpu=8", f"directory={tmp_path}")
    job = launched(tmp_path, *options, hosts=4, points=(("trainer.seed=3",),))
    _, ray_job = kubernetes.manifests(job)
    script = ray_job["spec"]["entrypoint"].replace("/run-file", str(tmp_path))
    script = script.replace("elarge launch", f"{Path(sys.executable).parent}/elarge launch")
    done = subprocess.run(
        script.removesuffix("'") + " --dry-run'", shell=True, capture_output=True, check=True
    )
    shown = yaml.safe_load(done.stdout)
    assert shown["bundles"] == [{"CPU": 1.0, "GPU": 8.0}] * 4
    assert "--set trainer.seed=3" in shown["runs"][0][3]["commands"][0]


def pod_processes(manifests: Sequence[Any], folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """Start the containers of the first JobSet as processes of this machine.

    The coordinator's name becomes an address, and the folder of the run file that of the run.
    """
    file, job_set = manifests[:2]
    spec = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    script = container["command"][2].replace("/run-file", str(folder))
    assert (folder / "run.yaml").read_text() == file["data"]["run.yaml"]
    started = []
    for index in range(spec["completions"]):
        variables = {one["name"]: one.get("value", str(index)) for one in container.get("env", ())}
        if "JAX_COORDINATOR_ADDRESS" in variables:
            variables["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        programs = Path(sys.executable).parent
        path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "XLA_FLAGS": ""}
        started.append(
            subprocess.Popen(
                [*container["command"][:2], script],
                cwd=folder,
                env={**os.environ, **path, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_evicted_pod_ends_all_pods_with_the_code_that_starts_them_again(tmp_path: Path) -> None:
    job = launched(tmp_path, hosts=2)
    manifests = kubernetes.manifests(job)
    first = pod_processes(manifests, tmp_path, free_port())
    end = time.monotonic() + 600
    while len(losses(tmp_path / "runs/kubernetes")) < 6:
        assert time.monotonic() < end
        assert all(process.poll() is None for process in first), first[0].communicate()
        time.sleep(0.5)
    first[1].send_signal(signal.SIGTERM)  # what an eviction sends to one pod
    outputs = [process.communicate(timeout=300)[0] for process in first]
    policy = manifests[1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    [code] = policy["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert [process.returncode for process in first] == [code, code], outputs

    second = pod_processes(manifests, tmp_path, free_port())
    outputs = [process.communicate(timeout=600)[0] for process in second]
    assert [process.returncode for process in second] == [0, 0], outputs
    assert "resumed from step" in outputs[0]

    alone = {**os.environ, "XLA_FLAGS": ""}
    words = ["elarge", "run.yaml", "--set", "trainer.save_directory=runs/alone"]
    words[0] = str(Path(sys.executable).parent / "elarge")
    subprocess.run(words, cwd=tmp_path, env=alone, check=True, capture_output=True)
    expected, found = losses(tmp_path / "runs/alone"), losses(tmp_path / "runs/kubernetes")
    assert [*found] == [*expected] == [*range(1, 61)]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-6)


def test_command_of_the_page_applies_manifests_whose_containers_train(tmp_path: Path) -> None:
    (block,) = executed_by("test_launch_kubernetes.py", ROOT / "docs/tasks/kubernetes.md")
    (tmp_path / "run.yaml").write_text(
        RUN.replace("max_training_steps: 60", "max_training_steps: 3")
    )
    kubectl = tmp_path / "programs/kubectl"  # in place of a cluster
    kubectl.parent.mkdir()
    kubectl.write_text('#!/bin/bash\n[ "$*" = "apply -f -" ] && cat > applied.yaml\n')
    kubectl.chmod(0o700)
    programs = [str(kubectl.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(programs)}
    subprocess.run(["bash", "-ec", block.body], cwd=tmp_path, env=environment, check=True)

    manifests = [*yaml.safe_load_all((tmp_path / "applied.yaml").read_text())]
    queue = manifests[1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert (queue, manifests[1]["kind"]) == ("team", "JobSet")
    pods = pod_processes(manifests, tmp_path, free_port())
    outputs = [pod.communicate(timeout=600)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert [*losses(tmp_path / "runs/kubernetes")] == [1, 2, 3]
