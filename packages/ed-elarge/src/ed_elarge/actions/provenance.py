"""What produced a result: the resolved configuration, package versions and seed of a run.

`config.yaml` and `environment.json` are written next to the output of each run, before its first
action. `elarge diff --run` compares them.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from ed_infra.errors import ConfigError

if TYPE_CHECKING:
    from ed_elarge.config.run_config import RunConfig

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"

#: Distributions whose versions matter to a run.
PACKAGES = (
    *("ed-infra", "ed-layers", "ed-models", "ed-data", "ed-trainers", "ed-esurge", "ed-elarge"),
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "tokenizers"),
    *("datasets", "lm-eval", "safetensors", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"),
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter to a run."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(run: RunConfig) -> None:
    """Write configuration and environment next to each output of a run.

    A training run writes into its directory. Without a trainer, an evaluation with `output_path:
    results.json` writes `results.config.yaml` and `results.environment.json`. A run without output
    writes nothing.
    """
    for config, environment in _places(run):
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(run.to_yaml(secrets=False), "utf-8")
        environment.write_text(json.dumps(_facts(run), indent=2) + "\n", "utf-8")


def _places(run: RunConfig) -> list[tuple[Path, Path]]:
    if run.trainer is not None and run.will("train"):
        return [(run.directory / CONFIG, run.directory / ENVIRONMENT)]
    found = []
    for action in run.actions:
        if action.name == "eval":
            output = action.options.over(run.eval).output_path
            path = Path(output) if output is not None else None
            if path is None and run.trainer is not None:
                path = run.directory / "eval" / "results.json"
            if path is not None:
                names = (f"{path.stem}.{name}" for name in (CONFIG, ENVIRONMENT))
                found.append(tuple(path.with_name(name) for name in names))
    return found


def _facts(run: RunConfig) -> dict[str, Any]:
    """Return versions, devices and seeds. Importing jax is no cost here: the run uses it."""
    import jax

    trainer, mixture = run.trainer, run.mixture
    return {
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "platform": platform.platform(),
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "seeds": {
            "trainer": trainer.seed if trainer is not None else None,
            "mixture": mixture.seed if mixture is not None else None,
            "esurge": run.esurge.seed,
        },
    }


def read(directory: Path) -> dict[str, Any]:
    """Return configuration, versions and seeds of a finished run.

    Raises:
        ConfigError: The directory has no files of a run.
    """
    try:
        config = yaml.safe_load((directory / CONFIG).read_text("utf-8"))
        facts = json.loads((directory / ENVIRONMENT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} has no {CONFIG} and {ENVIRONMENT} of a finished run: {error}"
        ) from error
    kept = ("versions", "platform", "devices", "processes", "seeds")
    return {**config, "environment": {name: facts.get(name) for name in kept}}
