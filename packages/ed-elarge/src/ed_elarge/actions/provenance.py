"""What produced a result: the resolved configuration, package versions and seed of a run.

`config.yaml` and `environment.json` describe the output next to them. A training run writes them
before its first step, and an evaluation with its results. A run that trains nothing, or that is
refused, leaves them unchanged. `elarge diff --run` compares them.
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
    from ed_trainers import Callback
    from ed_trainers.callbacks import RunningTrainer

    from ed_elarge.config.run_config import RunConfig

# The name of `python -m ed_elarge`.
_PROGRAMS = {"__main__.py": "elarge"}

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"

#: Distributions whose versions matter to a run.
_PACKAGES = (
    *("ed-infra", "ed-layers", "ed-models", "ed-data", "ed-trainers", "ed-esurge", "ed-elarge"),
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "tokenizers"),
    *("datasets", "lm-eval", "safetensors", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"),
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter to a run."""
    package_versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            package_versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return package_versions


def create_recorder(run: RunConfig) -> Callback:
    """Return the callback that writes configuration and environment of a run that trains."""
    from ed_trainers import Callback

    class Recorder(Callback):
        def on_train_begin(self, trainer: RunningTrainer, step: int) -> None:
            if step < trainer.total_steps:
                _write(run, run.directory / CONFIG, run.directory / ENVIRONMENT)

    return Recorder()


def write_beside(run: RunConfig, results: Path) -> None:
    """Write configuration and environment of an evaluation next to its results.

    The files of `results.json` are `results.config.yaml` and `results.environment.json`.
    """
    names = (f"{results.stem}.{name}" for name in (CONFIG, ENVIRONMENT))
    _write(run, *(results.with_name(name) for name in names))


def _write(run: RunConfig, config: Path, environment: Path) -> None:
    from ed_infra.distributed import is_main

    if not is_main():
        return
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(run.to_yaml(secrets=False), "utf-8")
    environment.write_text(json.dumps(_facts(run), indent=2) + "\n", "utf-8")


def _facts(run: RunConfig) -> dict[str, Any]:
    """Return versions, devices and seeds. Importing jax is no cost here: the run uses it."""
    import jax

    trainer, mixture = run.trainer, run.mixture
    program = Path(sys.argv[0]).name
    return {
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [_PROGRAMS.get(program, program), *sys.argv[1:]],
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


def read_provenance(directory: Path) -> dict[str, Any]:
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
    field_names = ("versions", "platform", "devices", "processes", "seeds")
    return {**config, "environment": {name: facts.get(name) for name in field_names}}
