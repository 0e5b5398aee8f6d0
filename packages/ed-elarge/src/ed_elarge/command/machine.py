"""The command `doctor`: versions, devices and folders of this machine."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from ed_esurge.command.program import Result, show_result

from ed_elarge.actions.provenance import versions


def doctor() -> Result:
    """Print versions, devices, memory, the native CPU kernels, and the folders of caches.

    The exit code is 1 if something needs attention.
    """
    problems: list[str] = []
    facts = {**versions(), "memory": _memory()}
    try:
        import jax

        for device in jax.devices():
            stats = device.memory_stats() if device.platform != "cpu" else None
            size = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if stats else ""
            facts[f"device {device.id}"] = f"{device.platform} {device.device_kind}{size}"
        if jax.default_backend() == "cpu":
            from ed_layers.native import describe

            facts["native CPU kernels"] = describe()
    except Exception as error:  # a broken plugin must not hide the rest of the report
        problems.append(f"jax finds no devices: {error}")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = os.environ.get("HF_HOME") or home / "huggingface"
    for name, folder in (("compiled programs", home / "easydel"), ("Hugging Face", Path(hub))):
        state = "writable" if _writable(folder) else "NOT writable"
        facts[f"cache: {name}"] = f"{folder} ({state})"
        if state != "writable":
            problems.append(f"{folder} is not writable: set XDG_CACHE_HOME or HF_HOME")
    for name, fact in facts.items():
        show_result(f"{name:<28}{fact}")
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return Result({"facts": facts, "problems": problems}, int(bool(problems)))


def _memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (os.sysconf(n) * page / 2**30 for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    except (ValueError, OSError):  # names differ between systems
        return "unknown"
    return f"{total:.1f} GiB, {free:.1f} GiB free; {os.cpu_count()} CPUs ({platform.machine()})"


def _writable(folder: Path) -> bool:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
