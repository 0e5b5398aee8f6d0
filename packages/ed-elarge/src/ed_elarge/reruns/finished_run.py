"""A run in its directory: its run file, its checkpoints, and the seconds of its steps.

A batch is a pure function of the configuration, the seed and the step. A run that starts at a
checkpoint of another run therefore computes the same numbers, on the same devices and versions.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError

from ed_elarge.actions.provenance import CONFIG, ENVIRONMENT, read_provenance, versions
from ed_elarge.config import nodes
from ed_elarge.config.layers import replace_value, with_settings
from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.errors import Document

CHECKPOINTS, TOKENIZER = "checkpoints", "tokenizer"
_METRICS = "metrics.jsonl"
#: Keys of the directory and of other copies of a run, which a replay does not share.
_SEPARATE = ("mirror_address", "memory_directory")


@dataclass(frozen=True)
class FinishedRun:
    """A run that has trained.

    Attributes:
        directory: its directory.
        run: its validated configuration.
        checkpoints: the steps of its checkpoints, ascending.
        record: the description of the run in its newest checkpoint.
    """

    directory: Path
    run: RunConfig
    checkpoints: Sequence[int]
    record: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, directory: Path) -> FinishedRun:
        """Read a run from its directory.

        Raises:
            ConfigError: the directory has no run that has trained, or has no checkpoint.
        """
        read_provenance(directory)  # raises an error that names both files
        run = normalize(nodes.read_yaml(directory / CONFIG))
        if run.trainer is None or run.mixture is None:
            raise ConfigError(f"{directory / CONFIG} trains nothing: pass the directory of a run")
        steps = sorted(
            int(path.name) for path in (directory / CHECKPOINTS).glob("*") if path.name.isdigit()
        )
        if not steps:
            raise ConfigError(
                f"{directory} has no checkpoints, so the length of the run is unknown: pass the "
                "directory of a run that has saved one (trainer.save_steps)"
            )
        path = directory / CHECKPOINTS / str(steps[-1]) / "run" / "metadata"
        try:
            record = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}): restore the checkpoint from a copy, or move it "
                "away to use the previous one"
            ) from error
        return cls(directory, run, steps, record)

    @property
    def total_steps(self) -> int:
        """Number of updates of the whole run."""
        return int(self.record["total_steps"])

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, measured by the run; None if unknown."""
        seconds = (self.record.get("meter") or {}).get("seconds") or {}
        productive = seconds.get("productive")
        return productive / self.checkpoints[-1] if productive else None

    @property
    def start_seconds(self) -> float:
        """Seconds of the run before its first step, and of its compilation."""
        seconds = (self.record.get("meter") or {}).get("seconds") or {}
        return float(seconds.get("restart", 0.0) + seconds.get("compile", 0.0))

    def find_checkpoint(self, step: int) -> int:
        """Return the last checkpoint at or before a number of updates; 0 is the start."""
        return max((one for one in self.checkpoints if one <= step), default=0)

    def predict_seconds(self, steps: int) -> float | None:
        """Return the seconds of a replay of some steps; None if the run has measured none."""
        if not steps or self.step_seconds is None:
            return None if steps else 0.0
        return self.start_seconds + steps * self.step_seconds

    def refuse(self, command: str, *, samples: bool) -> None:
        """Check that the run can be replayed exactly.

        Args:
            command: the command, for the message.
            samples: whether methods that sample completions can be replayed.

        Raises:
            ConfigError: it cannot.
        """
        run = self.run
        if run.asynchronous is not None:
            raise ConfigError(
                f"elarge {command} replays steps, and the steps of {self.directory} depend on when "
                "its engines finished (section asynchronous): train again from the run file"
                + (" without the rows" if samples is False else " with the changed values")
            )
        if not samples and run.takes_prompts:
            raise ConfigError(
                f"elarge {command} keeps the places of rows, and {run.method} generates "
                "completions for each prompt: remove the rows from the data, and train again"
            )
        if not samples and run.mixture is not None and run.mixture.streaming:
            raise ConfigError(
                f"elarge {command} finds the steps that used a row, and a stream does not know its "
                "rows in advance: remove the rows from the data, and train again, with "
                "mixture.streaming: false if rows may have to be forgotten later"
            )

    def change(
        self,
        target: Path,
        values: Mapping[str, Any],
        settings: Sequence[str] = (),
    ) -> RunConfig:
        """Return the run in another directory, with changed values, and with one action: `train`.

        Args:
            target: the directory of the new run.
            values: dotted key -> value.
            settings: texts of `--set`.
        """
        document = nodes.read_yaml(self.directory / CONFIG)
        changes = {f"trainer.{name}": None for name in _SEPARATE} | dict(values)
        changes |= {"trainer.save_directory": str(target), "trainer.resume_if_possible": True}
        value = document.value
        for key, new in changes.items():
            if new is not None or _has_key(value, key):
                value = replace_value(value, tuple(key.split(".")), new)
        value = {**value, "actions": ["train"]}
        changed = Document(document.name, value=value)
        if settings:
            changed = with_settings(changed, settings, nodes.parse_yaml)
        return normalize(changed, require_actions=True)

    def copy_start(self, target: Path, step: int) -> None:
        """Copy the checkpoints up to a step, the metrics and the tokenizer to a new directory.

        Files are linked where the file system can link them; a run never changes a checkpoint.
        """
        target.mkdir(parents=True, exist_ok=True)
        for one in self.checkpoints:
            source, copy = (path / CHECKPOINTS / str(one) for path in (self.directory, target))
            if one <= step and not copy.exists():
                shutil.copytree(source, copy, copy_function=_link)
        for name in (_METRICS, TOKENIZER):
            source, copy = self.directory / name, target / name
            if source.is_dir() and not copy.exists():
                shutil.copytree(source, copy)
            elif source.is_file() and not copy.exists():
                shutil.copyfile(source, copy)

    def list_differences(self) -> list[str]:
        """Return the versions and devices in which this machine differs from that of the run."""
        import jax

        facts = json.loads((self.directory / ENVIRONMENT).read_text("utf-8"))
        now = {**versions(), "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()]}
        then = {**(facts.get("versions") or {}), "devices": facts.get("devices")}
        names = [name for name in (*_NUMERIC, "devices") if then.get(name) != now.get(name)]
        return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in names]


#: Packages whose versions determine the bits of a step.
_NUMERIC = ("ed-layers", "ed-models", "ed-trainers", "jax", "jaxlib", "flax", "optax", "numpy")


def claim_directory(target: Path, name: str, facts: Mapping[str, Any]) -> bool:
    """Return whether a directory has an unfinished replay with equal facts, which continues.

    Args:
        target: the directory.
        name: the file with the facts of a replay.
        facts: values that identify this replay.

    Raises:
        ConfigError: the directory has other files.
    """
    if not target.exists() or not any(target.iterdir()):
        return False
    try:
        there = json.loads((target / name).read_text("utf-8"))
    except (OSError, ValueError):
        there = {}
    if any(there.get(key) != value for key, value in facts.items()):
        raise ConfigError(f"{target} exists and has other files: choose another --output")
    return True


def warn_of_machine(parent: FinishedRun, say: Callable[[str], None] | None = None) -> list[str]:
    """Print and return the differences of the machine, because of which the bits may differ."""
    differences = parent.list_differences()
    for line in differences:
        text = f"warning: the numbers may differ from those of the run: {line}"
        print(text, file=sys.stderr) if say is None else say(text)
    return differences


def write_record(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.new")
    partial.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(path)


def _link(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _has_key(value: object, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True
