"""Ray: one actor per host in a placement group, which runs the processes of the host.

A failed process or a lost host ends the others; the run then starts again from its checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import yaml
from ed_infra.errors import ConfigError

from ed_elarge.exits import BAD_INPUT, FAILED, INTERRUPTED
from ed_elarge.launch import ray_host
from ed_elarge.launch.launched_run import LaunchedRun, jax_variables

#: Resources of Ray by the option that sets them.
_RESOURCES = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}
_OWN = ("address", "resource", "restarts", "wait", *_RESOURCES)
#: Starts after the first one, and seconds in which the cluster must provide the hosts.
_RESTARTS, _WAIT = 3.0, 600.0
#: Seconds between two looks at a host, and in which the other processes may report a failure too.
_LOOK, _SETTLE = 0.5, 3.0
#: Seconds in which the hosts must kill their processes.
_WAIT_KILL = 10
_COORDINATOR = "HOST_OF_BUNDLE_0:FREE_PORT"


@dataclass(frozen=True)
class RayPlacement:
    """The hosts of a run in a Ray cluster.

    Attributes:
        address: Address of the cluster; `auto`: `RAY_ADDRESS`, or the cluster of this machine.
        bundles: Resources of each host by name; every bundle is on another host.
        restarts: Largest number of starts after the first one.
        wait: Seconds in which the cluster must provide the hosts.
    """

    address: str
    bundles: tuple[dict[str, float], ...]
    restarts: int
    wait: float


def placement(job: LaunchedRun) -> RayPlacement:
    """Return the placement that the options of a launch describe.

    Raises:
        ConfigError: An option is unknown, or its value is invalid.
    """
    resources = {"CPU": 1.0}
    numbers: dict[str, float] = {"restarts": _RESTARTS, "wait": _WAIT}
    address = "auto"
    for name, value in job.options:
        if name not in _OWN:
            raise ConfigError(f"--option {name} must be one of {', '.join(_OWN)}")
        if name == "address":
            address = value
        elif name == "resource":
            key, _, amount = value.rpartition(":")
            if not key:
                raise ConfigError(f"--option resource={value} must be resource=NAME:AMOUNT")
            resources[key] = _number(f"resource={value}", amount)
        elif name in _RESOURCES:
            resources[_RESOURCES[name]] = _number(f"{name}={value}", value)
        else:
            numbers[name] = _number(f"{name}={value}", value)
    if numbers["restarts"] % 1:
        raise ConfigError(f"--option restarts={numbers['restarts']} must be a whole number")
    bundle = {name: amount for name, amount in resources.items() if amount}
    if not bundle:
        raise ConfigError(
            "--option cpu=0 needs gpu, tpu or resource: each host must have a resource"
        )
    return RayPlacement(
        address, (bundle,) * (job.hosts or 1), int(numbers["restarts"]), numbers["wait"]
    )


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e15:  # also refuses nan
        raise ConfigError(f"--option {option} must end with a number from 0")
    return number


def _commands(job: LaunchedRun, point: Sequence[str], host: int, coordinator: str) -> list[str]:
    """Return the shell commands of a host's processes."""
    count = (job.hosts or 1) * job.processes
    first = host * job.processes
    return [
        job.shell(point, jax_variables(coordinator, count, number))
        for number in range(first, first + job.processes)
    ]


def render(job: LaunchedRun) -> str:
    """Return the placement and the commands of all runs, as YAML."""
    ray_placement = placement(job)
    runs = [
        [
            {"bundle": host, "commands": _commands(job, point, host, _COORDINATOR)}
            for host in range(len(ray_placement.bundles))
        ]
        for point in job.points
    ]
    document = {
        "address": ray_placement.address,
        "strategy": "STRICT_SPREAD",
        "bundles": [dict(bundle) for bundle in ray_placement.bundles],
        "restarts": ray_placement.restarts,
        "wait": ray_placement.wait,
        "runs": runs,
    }
    return yaml.safe_dump(document, sort_keys=False, width=1000)


def start(job: LaunchedRun) -> int:
    """Run every point of a sweep, one after another; return the first exit code that is not 0.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or the options are invalid.
    """
    ray_placement = placement(job)
    # With `uv run`, Ray would copy this folder to the hosts and start their Python anew.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray import cloudpickle  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            '--on ray needs Ray: install it with pip install "ed-elarge[ray]"'
        ) from None
    try:
        ray.init(address=ray_placement.address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {ray_placement.address!r} ({error}): start one with "
            "`ray start --head`, or set --option address=HOST:PORT"
        ) from None
    cloudpickle.register_pickle_by_value(ray_host)
    code = 0
    try:
        with _Stops() as stops:
            for point in job.points:
                ended = _run(ray, job, point, ray_placement, stops)
                code = code or ended
                if stops.count:
                    break
    finally:
        ray.shutdown()
    return code


class _Stops:
    """Counts SIGINT and SIGTERM: the first one saves and ends the run, the second one kills it."""

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Stops:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.count += 1


@dataclass(frozen=True)
class _Outcome:
    """The end of one start: an exit code, and a description of the failures."""

    code: int
    failures: str = ""
    lost: bool = False


def _run(
    ray: ModuleType,
    job: LaunchedRun,
    point: Sequence[str],
    ray_placement: RayPlacement,
    stops: _Stops,
) -> int:
    """Run one point until it ends, or fails more often than it may start again."""
    for attempt in range(ray_placement.restarts + 1):
        with _hosts(ray, ray_placement, stops) as hosts:
            if hosts is None:
                return INTERRUPTED
            outcome = _watch(ray, job, point, hosts, stops)
        if outcome.code == 0 or stops.count:
            return outcome.code
        if outcome.code == BAD_INPUT and not outcome.lost:  # the next start would end alike
            _say(f"the run failed: {outcome.failures}")
            return outcome.code
        if attempt < ray_placement.restarts:
            restart_note = f"start {attempt + 1} of {ray_placement.restarts} after the first"
            _say(f"{outcome.failures}; the run starts again from its checkpoint ({restart_note})")
            continue
        _say(
            f"the run failed: {outcome.failures}. It started again {ray_placement.restarts} times "
            f"(--option restarts={ray_placement.restarts}); the same command continues it"
        )
        return outcome.code
    raise AssertionError("every start returns or continues")


def _say(message: str) -> None:
    print(f"ray: {message}", file=sys.stderr, flush=True)


@contextmanager
def _hosts(
    ray: ModuleType, ray_placement: RayPlacement, stops: _Stops
) -> Iterator[list[Any] | None]:
    """Yield one actor per host, or None after a request to stop; the actors end afterwards.

    Raises:
        ConfigError: The cluster does not provide the hosts in time.
    """
    from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
        placement_group,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        PlacementGroupSchedulingStrategy,
    )

    group = placement_group(
        [dict(bundle) for bundle in ray_placement.bundles], strategy="STRICT_SPREAD"
    )
    hosts: list[Any] = []
    try:
        limit = time.monotonic() + ray_placement.wait
        while not stops.count and not group.wait(_LOOK):
            if time.monotonic() > limit:
                alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
                raise ConfigError(
                    f"the cluster provided no {len(ray_placement.bundles)} hosts with "
                    f"{ray_placement.bundles[0]} within {ray_placement.wait:g} s; its hosts are "
                    f"{alive}: add "
                    "hosts, ask for less, or raise --option wait=SECONDS"
                )
        if stops.count:
            yield None
            return
        actor = ray.remote(ray_host.HostProcesses)
        for number, bundle in enumerate(ray_placement.bundles):
            device_options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            other_resources = {k: v for k, v in bundle.items() if k not in ("CPU", "GPU")}
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            )
            host_actor = actor.options(
                resources=other_resources, scheduling_strategy=strategy, **device_options
            )
            hosts.append(host_actor.remote())
        yield hosts
    finally:
        # An actor that was killed ends its processes too, but not those that they started.
        if hosts:
            kills = [host.kill.remote() for host in hosts]
            ray.wait(kills, num_returns=len(kills), timeout=_WAIT_KILL)
        for host in hosts:
            ray.kill(host)
        remove_placement_group(group)


def _watch(
    ray: ModuleType, job: LaunchedRun, point: Sequence[str], hosts: Sequence[Any], stops: _Stops
) -> _Outcome:
    """Start the processes, print their lines, and return when all have ended or one has failed."""
    try:
        addresses = ray.get([host.address.remote() for host in hosts], timeout=_WAIT)
        coordinator = f"{addresses[0][1]}:{addresses[0][2]}"
        for number, host in enumerate(hosts):
            ray.get(host.begin.remote(_commands(job, point, number, coordinator)))
    except ray.exceptions.RayError as error:
        return _Outcome(FAILED, f"a host was lost before the start ({_first_line(error)})", True)
    names = [name for name, _, _ in addresses]
    _say(f"{len(hosts)} hosts: {', '.join(names)}; coordinator {coordinator}")

    codes: dict[int, int | None] = {}
    failures: list[str] = []
    lost = False
    stop_count, settle = 0, float("inf")
    waiting = {host.poll.remote(_LOOK): number for number, host in enumerate(hosts)}
    while waiting and time.monotonic() < settle:
        if stops.count > stop_count:
            stop_count = stops.count
            _say("the run stops and saves" if stop_count == 1 else "the processes are killed")
            for host in hosts:
                (host.stop if stop_count == 1 else host.kill).remote()
        for done in ray.wait([*waiting], num_returns=1, timeout=_LOOK)[0]:
            number = waiting.pop(done)
            try:
                lines, ended = ray.get(done)
            except ray.exceptions.RayError as error:
                lost = True
                failures.append(f"host {number} ({names[number]}) was lost: {_first_line(error)}")
                continue
            for process, line in lines:
                print(f"[{names[number]}/{number * job.processes + process}] {line}", flush=True)
            for process, code in enumerate(ended):
                named = number * job.processes + process
                if code and codes.get(named) is None:
                    failures.append(f"process {named} on {names[number]} {_ending(code)}")
                codes[named] = code
            if any(code is None for code in ended):
                waiting[hosts[number].poll.remote(_LOOK)] = number
        if failures and settle == float("inf"):
            # The other processes lose their peer; one of them may show the cause.
            settle = time.monotonic() + _SETTLE
    if not failures:
        return _Outcome(0)
    ended_with = [code for code in codes.values() if code]
    # A process that ends by itself after its peer was killed hides the cause.
    code = next((c for c in ended_with if c < 0), ended_with[0] if ended_with else FAILED)
    return _Outcome(128 - code if code < 0 else code, "; ".join(failures), lost)


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
