"""Kubernetes: a JobSet or a RayJob that trains on several hosts, or a Deployment that serves.

A JobSet starts again from its checkpoint after a failure; evictions do not count as failures. With
the option `queue`, Kueue starts the job when its quota allows.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.config import nodes
from ed_elarge.config.layers import INCLUDE
from ed_elarge.exits import STOPPED_VARIABLE
from ed_elarge.launch.launched_run import LaunchedRun, jax_variables
from ed_elarge.plan.devices import parse_hardware

#: Options of this launcher and their meanings.
OPTIONS = {
    "image": "image of the containers, with elarge and the data that no volume has",
    "namespace": "namespace of the objects",
    "claim": "persistent volume claim that all hosts mount at the folder of the run",
    "directory": "folder in which the run starts; default /workspace",
    "queue": "local queue of Kueue",
    "service-account": "service account of the pods",
    "secret": "secret whose keys become environment variables",
    "cpu": "processor cores of a host",
    "memory": "memory of a host, such as 64Gi",
    "gpu": "NVIDIA GPUs of a host",
    "tpu": "a TPU slice of GKE, such as v5e:4x4",
    "slices": "TPU slices that train together",
    "ray": "version of Ray in the image: a RayJob of KubeRay instead of a JobSet",
    "restarts": "times that a failed run starts again; default 3",
    "replicas": "servers; with max-replicas the smallest number",
    "max-replicas": "largest number of servers",
}
#: GKE's names of TPUs, and the largest number of chips of one host.
_ACCELERATORS = {
    "v4": ("tpu-v4-podslice", 4),
    "v5e": ("tpu-v5-lite-podslice", 8),
    "v5p": ("tpu-v5p-slice", 4),
    "v6e": ("tpu-v6e-slice", 8),
}
#: Chips of a host in a slice of several hosts.
_CHIPS = 4
_PORT = 8476
_FILES = "/run-file"
#: Field of a pod with the number of its host.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
#: Exit code of a run that saved a checkpoint because Kubernetes stopped its pod.
_STOPPED = 75
#: Seconds in which a stopped run saves, or a stopped server finishes its requests.
_GRACE = 300
#: Waiting requests of a server above which another server starts.
_WAITING = 4

Objects = list[dict[str, Any]]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and equal values without references."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def manifests(job: LaunchedRun) -> Objects:
    """Return the objects of a run: its file, and a JobSet or RayJob per point, or a Deployment.

    Raises:
        ConfigError: An option is unknown, missing or invalid, or the run file cannot be sent.
    """
    options = dict(job.options)
    for name in options:
        if name not in OPTIONS:
            raise unknown_name("option of --on kubernetes", name, OPTIONS)
    if not options.get("image"):
        raise ConfigError("--on kubernetes needs an image: --option image=REGISTRY/NAME:TAG")
    if job.processes > 1:
        raise ConfigError(
            f"--processes-per-host {job.processes}: a pod runs one process, which uses all devices "
            "of its host"
        )
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:40].strip("-") or "run"
    name = name if name[0].isalpha() else f"run-{name}"[:40].strip("-")  # a Service needs a letter
    if job.server is not None:
        return [_run_file(job, name, options), *_server(job, name, options)]
    has_sweep = len(job.points) > 1
    names = [f"{name}-{number}" if has_sweep else name for number in range(len(job.points))]
    build_job = _ray_job if "ray" in options else _job_set
    jobs = [
        build_job(job, point_name, name, point, options)
        for point_name, point in zip(names, job.points, strict=True)
    ]
    return [_run_file(job, name, options), *jobs]


def render(job: LaunchedRun) -> str:
    """Return the manifests as YAML documents."""
    return yaml.dump_all(manifests(job), Dumper=_Dumper, sort_keys=False, width=100)


def start(job: LaunchedRun) -> int:
    """Apply the manifests with `kubectl`, and return its exit code.

    Raises:
        ConfigError: This machine has no `kubectl`, or the options are invalid.
    """
    text = render(job)
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            "there is no program kubectl: install it, or write the manifests with --dry-run"
        ) from None
    return done.returncode


def _metadata(name: str, job: str, options: Mapping[str, str], **more: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": job, "app.kubernetes.io/managed-by": "elarge"}
    labels.update(more.pop("labels", {}))
    space = {"namespace": options["namespace"]} if "namespace" in options else {}
    return {"name": name, **space, "labels": labels, **more}


def _file_key(job: LaunchedRun) -> str:
    """Return the name of the run file in the pods, which is a key of a ConfigMap."""
    return re.sub(r"[^-._a-zA-Z0-9]+", "-", Path(job.file).name).lstrip(".")[-253:] or "run.yaml"


def _run_file(job: LaunchedRun, name: str, options: Mapping[str, str]) -> dict[str, Any]:
    path = job.directory / job.file
    text = path.read_text(encoding="utf-8")
    value = nodes.parse_yaml(text, job.file).value  # PyYAML merges in exponential time
    if isinstance(value, Mapping) and INCLUDE in value:
        raise ConfigError(
            f"{job.file} includes other files, which the pods do not have: write the sections into "
            "one file"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(f"{name}-run-file", name, options),
        "data": {_file_key(job): text},
    }


def _job_set(
    job: LaunchedRun, point_name: str, name: str, point: tuple[str, ...], options: Mapping[str, str]
) -> dict[str, Any]:
    """Return a JobSet with one job per TPU slice, or with one job for all hosts."""
    hosts, slices, selector, resources = _devices(job, options)
    variables: Objects = [{"name": STOPPED_VARIABLE, "value": str(_STOPPED)}]
    if "tpu" not in options:  # processes on TPUs find each other
        connection = jax_variables(f"{point_name}-hosts-0-0.{point_name}:{_PORT}", hosts, _INDEX)
        variables += [
            {"name": key, "valueFrom": {"fieldRef": {"fieldPath": value}}}
            if value == _INDEX
            else {"name": key, "value": value}
            for key, value in connection.items()
        ]
    pod = _pod(job, name, point, options, variables, resources, selector)
    pod["restartPolicy"] = "Never"
    labels = {"kueue.x-k8s.io/queue-name": options["queue"]} if "queue" in options else {}
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    annotations = {"annotations": exclusive} if "tpu" in options else {}
    on_exit = {"containerName": "elarge", "operator": "In", "values": [_STOPPED]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(point_name, name, options, labels=labels, **annotations),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": _number(options, "restarts", 3, least=0),
                "rules": [
                    {
                        "name": "stoppedRunsContinue",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": "hosts",
                    "replicas": slices,
                    "template": {
                        "spec": {
                            "completionMode": "Indexed",
                            "completions": hosts,
                            "parallelism": hosts,
                            "backoffLimit": 0,
                            "podFailurePolicy": {
                                "rules": [
                                    {
                                        "action": "FailJob",
                                        "onPodConditions": [
                                            {"type": "DisruptionTarget", "status": "True"}
                                        ],
                                    },
                                    {"action": "FailJob", "onExitCodes": on_exit},
                                ]
                            },
                            "template": {"spec": pod},
                        }
                    },
                }
            ],
        },
    }


def _ray_job(
    job: LaunchedRun, point_name: str, name: str, point: tuple[str, ...], options: Mapping[str, str]
) -> dict[str, Any]:
    """Return a RayJob: its head runs `elarge launch --on ray`, its workers are the hosts."""
    hosts, slices, selector, resources = _devices(job, options)
    folder = options.get("directory", "/workspace")
    words = ["elarge", "launch", f"{_FILES}/{_file_key(job)}", "--on", "ray"]
    words += ["--hosts", str(hosts * slices), *(w for s in job.setup for w in ("--setup", s))]
    words += ["--option", f"restarts={_number(options, 'restarts', 3, least=0)}"]
    devices = {"nvidia.com/gpu": "gpu", "google.com/tpu": "tpu"}
    for resource, option in devices.items():
        if resource in resources:
            words += ["--option", f"{option}={resources[resource]}"]
    words += [word for pair in point for word in ("--set", pair)]
    script = "\n".join([f"cd {shlex.quote(folder)}", *job.setup, f"exec {shlex.join(words)}"])

    def group(resources: Mapping[str, str], selector: Mapping[str, str], cores: int) -> Any:
        pod = _pod(job, name, point, options, [], resources, selector)
        pod["containers"][0].pop("command")  # the operator starts Ray
        # A process of the run uses all cores of its host.
        return {"rayStartParams": {"num-cpus": str(cores)}, "template": {"spec": pod}}

    labels = {"kueue.x-k8s.io/queue-name": options["queue"]} if "queue" in options else {}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(point_name, name, options, labels=labels),
        "spec": {
            "entrypoint": shlex.join(["bash", "-c", script]),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": options["ray"],
                "headGroupSpec": group({}, {}, 0),
                "workerGroupSpecs": [
                    {
                        "groupName": "hosts",
                        "replicas": slices if "tpu" in options else hosts,
                        "minReplicas": slices if "tpu" in options else hosts,
                        "maxReplicas": slices if "tpu" in options else hosts,
                        "numOfHosts": hosts if "tpu" in options else 1,
                        **group(resources, selector, 1),
                    }
                ],
            },
        },
    }


def _server(job: LaunchedRun, name: str, options: Mapping[str, str]) -> Objects:
    """Return a Deployment, its Service and, with `max-replicas`, an autoscaler."""
    assert job.server is not None
    host, port = job.server
    if host in ("127.0.0.1", "localhost", "::1") or port == 0:
        raise ConfigError(
            f"the server listens on {host}:{port}, which no other pod reaches: write "
            "`serve: {host: 0.0.0.0, port: 8000}` in actions"
        )
    point, *other_points = job.points
    if other_points:
        raise ConfigError("--sweep: a server is one run; remove --sweep")
    hosts, slices, selector, resources = _devices(job, options)
    if hosts * slices > 1:
        raise ConfigError(
            f"the server needs {hosts * slices} hosts: a Deployment starts servers of one host; "
            "choose a slice with one host, or more replicas"
        )
    least = _number(options, "replicas", 1)
    most = _number(options, "max-replicas", least)
    if most < least:
        raise ConfigError(f"--option max-replicas={most} must be at least replicas ({least})")
    pod = _pod(job, name, point, options, [], resources, selector)
    container = pod["containers"][0]
    container["ports"] = [{"name": "http", "containerPort": port}]

    def probe(path: str, seconds: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": "http"},
            "periodSeconds": seconds,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    # Loading a large model lasts up to an hour; afterwards a server that does not answer restarts.
    container["startupProbe"] = probe("/health/ready", 5, 720)
    container["readinessProbe"] = probe("/health/ready", 5, 2)
    container["livenessProbe"] = probe("/health/live", 10, 6)
    selector_labels = {"app.kubernetes.io/name": name}
    scraped = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(name, name, options),
        "spec": {
            "replicas": least,
            "selector": {"matchLabels": selector_labels},
            "template": {
                "metadata": {"labels": selector_labels, "annotations": scraped},
                "spec": pod,
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, name, options),
        "spec": {
            "selector": selector_labels,
            "ports": [{"name": "http", "port": port, "targetPort": "http"}],
        },
    }
    if most == least:
        return [deployment, service]
    del deployment["spec"]["replicas"]  # the autoscaler owns the number
    waiting = {
        "metric": {"name": "vllm:num_requests_waiting"},
        "target": {"type": "AverageValue", "averageValue": str(_WAITING)},
    }
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _metadata(name, name, options),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [{"type": "Pods", "pods": waiting}],
            # A server that stops loses its prefix cache.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        },
    }
    return [deployment, service, autoscaler]


def _pod(
    job: LaunchedRun,
    name: str,
    point: tuple[str, ...],
    options: Mapping[str, str],
    variables: Objects,
    resources: Mapping[str, str],
    selector: Mapping[str, str],
) -> dict[str, Any]:
    """Return the specification of a pod with one container, which receives the signals."""
    folder = options.get("directory", "/workspace")
    words = job.words(point)
    words[1] = f"{_FILES}/{_file_key(job)}"
    script = "\n".join(["set -e", *job.setup, f"exec {shlex.join(words)}"])
    volumes: Objects = [{"name": "run-file", "configMap": {"name": f"{name}-run-file"}}]
    mounts: Objects = [{"name": "run-file", "mountPath": _FILES, "readOnly": True}]
    # The default of 64 MB is too small for processes that read rows.
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if "claim" in options:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": options["claim"]}})
        mounts.append({"name": "data", "mountPath": folder})
    container: dict[str, Any] = {
        "name": "elarge",
        "image": options["image"],
        "command": ["bash", "-c", script],
        "workingDir": folder,
        "volumeMounts": mounts,
    }
    if variables:
        container["env"] = variables
    if "secret" in options:
        container["envFrom"] = [{"secretRef": {"name": options["secret"]}}]
    if resources:
        container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": _GRACE}
    if "service-account" in options:
        pod["serviceAccountName"] = options["service-account"]
    if selector:
        pod["nodeSelector"] = dict(selector)
    return {**pod, "containers": [container], "volumes": volumes}


def _devices(
    job: LaunchedRun, options: Mapping[str, str]
) -> tuple[int, int, dict[str, str], dict[str, str]]:
    """Return hosts of a slice, slices, the labels of the nodes, and the resources of a host."""
    resources = {name: options[name] for name in ("cpu", "memory") if name in options}
    hosts = job.hosts or 1
    if "tpu" not in options:
        if "slices" in options:
            raise ConfigError("--option slices counts TPU slices: add --option tpu=v5e:4x4")
        if "gpu" in options:
            resources["nvidia.com/gpu"] = str(_number(options, "gpu", 1))
        return hosts, 1, {}, resources
    hardware = parse_hardware(options["tpu"], None)
    if hardware.device.name not in _ACCELERATORS:
        raise unknown_name("TPU of GKE", hardware.device.name, _ACCELERATORS)
    accelerator, most = _ACCELERATORS[hardware.device.name]
    chips = hardware.count if hardware.count <= most else _CHIPS
    needed = hardware.count // chips
    if job.hosts not in (0, needed):
        raise ConfigError(f"--hosts {job.hosts}: a slice {hardware.text} has {needed} hosts")
    resources["google.com/tpu"] = str(chips)
    selector = {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": hardware.text.partition(":")[2],
    }
    return needed, _number(options, "slices", 1), selector, resources


def _number(options: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    text = options.get(name, str(default))
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < least:
        raise ConfigError(f"--option {name}={text} must be a whole number of at least {least}")
    return int(text)
