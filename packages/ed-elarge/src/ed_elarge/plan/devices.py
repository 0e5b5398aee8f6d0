"""Devices of a plan: the table `devices.json`, the options `--topology` and `--devices`, memory."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ed_infra.errors import ConfigError, unknown_name

GIB = 2**30
#: Fraction of the memory of a GPU that jax allocates, unless the variable is set.
GPU_FRACTION, FRACTION_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"
#: Other names of devices.
_ALIASES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v6": "v6e",
    "v5": "v5p",
    "a100-80": "a100",
    "h100-80": "h100",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "rtxa6000": "a6000",
    "rtx6000": "rtx6000-ada",
    "6000-ada": "rtx6000-ada",
    "rtx6000ada": "rtx6000-ada",
}
#: Prefixes of vendors and product lines, which names may omit.
_PREFIXES = ("google-", "tpu-", "cloud-", "nvidia-", "geforce-", "tesla-")
#: TPU -> cores of a chip, which Google's names of its slices count (`v5p-8` has four chips).
_CORES = {"v4": 2, "v5p": 2}
#: Chips of a slice of a two-dimensional torus, by Google's names.
_SLICES = (1, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class DeviceKind:
    """One row of `devices.json`.

    Attributes:
        name, title: the key, and the vendor's name.
        kind: "tpu" or "gpu".
        memory_gib: memory that the driver reports, GiB.
        bf16, int8: peak FLOP/s in dense bfloat16, and operations/s in int8.
        bandwidth: bytes/s of the memory.
        link: bytes/s in one direction: of one link of a torus, or of a GPU inside its node.
        links: "torus" (with `torus` dimensions) or "node" (of `node` devices).
        network: bytes/s of one device between slices or nodes.
        source: where the figures come from.
        target: what XLA's compiler must know of a GPU, by the names of `get_target_config`; empty
            for TPUs, which libtpu knows.
        reached: share of the bound of a training step that MaxText's published runs reach, the
            median (`tools/bench/plan.py`); 0 = unknown.
    """

    name: str
    title: str
    kind: str
    memory_gib: float
    bf16: float
    int8: float
    bandwidth: float
    link: float
    links: str
    network: float
    source: str
    torus: int = 0
    node: int = 0
    reached: float = 0.0
    target: Mapping[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Bytes that a program can use: all of a TPU's memory, jax's share of a GPU's."""
        share = 1.0
        if self.kind == "gpu":
            share = float(os.environ.get(FRACTION_VARIABLE) or GPU_FRACTION)
        return int(self.memory_gib * GIB * share)

    def get_target_config(self) -> str:
        """Return the text of XLA's message `GpuTargetConfigProto`, for compilation without the GPU.

        Raises:
            ConfigError: the device is no GPU.
        """
        if not self.target:
            raise ConfigError(f"{self.title} is no GPU: use --compile tpu")
        major, minor = self.target["capability"]
        shared_core, shared_block = self.target["shared"]
        fields = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": shared_core,
            "threads_per_core_limit": self.target["threads"],
            "core_count": self.target["cores"],
            "fpus_per_core": self.target["units"],
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": int(self.bandwidth),
            "l2_cache_size": self.target["l2"],
            "clock_rate_ghz": self.target["clock"],
            "device_memory_size": int(self.memory_gib * GIB),
            "shared_memory_per_block_optin": shared_block,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        # The compiler uses instructions that exist in this generation only: sm_90a, sm_100a.
        extension = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
        numbers = " ".join(f"{name}: {value}" for name, value in fields.items())
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}"
        return (
            f'gpu_device_info {{ {numbers} {capability} name: "{self.title}" }} '
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } '
            f'device_description_str: "{self.title}"'
        )


@dataclass(frozen=True)
class Hardware:
    """Devices of one kind, and their arrangement.

    Attributes:
        device: one device.
        shape: sizes of a TPU's torus, or the number of GPUs.
    """

    device: DeviceKind
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def text(self) -> str:
        """The option that names the hardware."""
        if self.device.links == "torus":
            return f"{self.device.name}:{'x'.join(map(str, self.shape))}"
        return f"{self.count}x{self.device.name}"


def read_devices() -> dict[str, DeviceKind]:
    """Return all devices by name."""
    rows = json.loads(files("ed_elarge.plan").joinpath("devices.json").read_text("utf-8"))
    return {name: DeviceKind(name=name, **row) for name, row in rows.items()}


def find_device(name: str) -> DeviceKind:
    """Return the device of a name.

    Raises:
        ConfigError: the table has no such device.
    """
    kinds, key = read_devices(), re.sub(r"[\s_]+", "-", name.strip().lower())
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    key = re.sub(r"^rtx-", "rtx", key)
    key = _ALIASES.get(key, key)
    if key not in kinds:
        raise unknown_name("device", name, kinds)
    return kinds[key]


def parse_hardware(topology: str | None, devices: str | None) -> Hardware:
    """Return the hardware of the options `--topology` and `--devices`.

    Args:
        topology: a TPU and the sizes of its torus: `v5e:4x4`, or Google's name of a slice.
        devices: a number and a device: `8xH200`, a device alone, or Google's name of a slice:
            `v5litepod-16`.

    Raises:
        ConfigError: both or neither of the options are given, or one is invalid.
    """
    if (topology is None) == (devices is None):
        raise ConfigError("name the hardware once: --topology v5e:4x4, or --devices 8xH200")
    named_slice = _parse_slice(str(topology or devices))
    if named_slice is not None:
        return named_slice
    if topology is not None:
        name, colon, sizes = topology.partition(":")
        device = find_device(name)
        if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
            raise ConfigError(f"--topology {topology!r} is no topology: write {name}:4x4")
        shape = tuple(int(size) for size in sizes.split("x"))
        if device.links != "torus":
            raise ConfigError(
                f"{device.title} has no torus: write --devices {math.prod(shape)}x{device.name}"
            )
        if len(shape) > device.torus:
            raise ConfigError(
                f"--topology {topology!r} has {len(shape)} dimensions, and the torus of "
                f"{device.title} has {device.torus}"
            )
        return Hardware(device, shape)
    text = str(devices)
    match = re.fullmatch(r"(?:([1-9]\d*)\s*x\s*)?(?!\d+x)(\w[\w -]*)", text.strip())
    if match is None:
        raise ConfigError(f"--devices {text!r} is invalid: write a number and a device, 8xH200")
    device, count = find_device(match[2]), int(match[1] or 1)
    if device.links == "torus" and count > 1:
        side = 2 ** (int(math.log2(count)) // 2)
        shape = (side, count // side) if count % side == 0 else (count,)
        return Hardware(device, shape)
    return Hardware(device, (count,))


def _parse_slice(text: str) -> Hardware | None:
    """Return the slice of Google's name (`v5litepod-16`, `v6e-8`, `v5p-8`); None for other names.

    Raises:
        ConfigError: the TPU has no slice of this size.
    """
    match = re.fullmatch(r"(?:google-|cloud-|tpu-)*(v\d\w*)-(\d{1,6})", text.strip().lower())
    name = "" if match is None else _ALIASES.get(match[1], match[1])
    device = read_devices().get(name)
    if match is None or device is None:
        return None
    cores, count = _CORES.get(name, 1), int(match[2])
    chips = count // cores
    if device.torus == 2 and chips not in _SLICES:
        raise ConfigError(
            f"{device.title} has no slice {text!r}: the number of chips is one of "
            f"{', '.join(map(str, _SLICES))}"
        )
    if device.torus == 3 and (count % cores or chips < 4 or chips % 4):
        raise ConfigError(
            f"{device.title} has no slice {text!r}: the name counts cores, {cores} for each chip, "
            f"and a slice has a multiple of 4 chips, such as {match[1]}-8 with 4 chips"
        )
    return Hardware(device, _split_evenly(chips, device.torus))


def _split_evenly(chips: int, dimensions: int) -> tuple[int, ...]:
    """Return the sizes of a torus that differ the least, in Google's order: 2x2x1, 2x4x4."""
    if dimensions == 1:
        return (chips,)
    shapes = [
        (*_split_evenly(chips // size, dimensions - 1), size)
        for size in range(1, chips + 1)
        if chips % size == 0
    ]
    best = min(shapes, key=lambda shape: (max(shape), -min(shape)))
    return tuple(sorted(best, key=lambda size: (size == 1, size)))


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on one device by part, and the bytes that a program can use."""

    parts: Mapping[str, int]
    limit: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def free(self) -> int:
        """Bytes that remain; negative = missing."""
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        """Whether all parts fit."""
        return self.free >= 0
