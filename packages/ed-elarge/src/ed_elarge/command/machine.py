"""The command `doctor`: versions, devices and folders of this machine, and missing families."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from ed_esurge.command.program import Result, show_result

from ed_elarge.actions.provenance import versions
from ed_elarge.command.runs import RunSettings

#: Task -> the table of `transformers` with the model types of the task.
TASK_TABLES = {
    "causal language models": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "images and texts": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "encoder-decoders": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked language models": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}


def doctor(
    numerics: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Also compare every kernel of a run file with float64, at the sizes of the run.",
        ),
    ] = None,
    settings: RunSettings = None,
    families: Annotated[
        bool, typer.Option("--families", help="List model types of transformers without a family.")
    ] = False,
) -> Result:
    """Print versions, devices, memory, the native CPU kernels, and the folders of caches.

    The exit code is 1 if something needs attention.
    """
    if families:
        return show_missing_families()
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
    kernels = [] if numerics is None else _check_numerics(numerics, settings or (), problems)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    values: dict[str, Any] = {"facts": facts, "problems": problems}
    if numerics is not None:
        values["kernels"] = kernels
    return Result(values, int(bool(problems)))


def _check_numerics(
    file: str, run_settings: Sequence[str], problems: list[str]
) -> list[Mapping[str, Any]]:
    """Print the errors of the kernels of a run file, and add those that are too large."""
    from ed_elarge.command.numerics import check_kernels, convert_errors, describe_errors
    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize

    run = normalize(with_settings(nodes.read_yaml(file), run_settings, nodes.parse_yaml))
    kernels: list[Mapping[str, Any]] = []
    for errors in check_kernels(run):
        kernels.append(convert_errors(errors))
        show_result(describe_errors(errors))
        if not errors.is_right:
            problems.append(
                f"{errors.title} differs from float64 ({errors.case}): select another kernel, "
                "update jax and the driver, or report the case"
            )
    return kernels


def show_missing_families() -> Result:
    """Print how many model types of the installed `transformers` have a family, and the others."""
    import transformers
    from ed_infra import registry
    from transformers.models.auto import modeling_auto

    known, missing_types = set(registry.model_types()), {}
    show_result(f"transformers {transformers.__version__}")
    for task, table in TASK_TABLES.items():
        names = sorted(getattr(modeling_auto, table, {}))
        missing_types[task] = [name for name in names if name not in known]
        show_result(f"\n{task}: {len(names) - len(missing_types[task])} of {len(names)}")
        show_result(textwrap.fill(", ".join(missing_types[task]), 100, break_on_hyphens=False))
    return Result({"transformers": transformers.__version__, "missing": missing_types}, 0)


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
