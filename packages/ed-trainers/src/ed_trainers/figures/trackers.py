"""Trackers of runs: weights & biases, trackio, mlflow; each is an extra of this package."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ed_infra.errors import ConfigError

from ed_trainers.figures.metrics import MetricRow, curves, histograms


class About(NamedTuple):
    """Description of a run for a tracker."""

    project: str
    name: str
    settings: dict[str, Any]
    entity: str | None = None
    shows_samples: bool = True


class Tracker(ABC):
    """A run of a tracker; a destination of metrics.

    A file in the directory contains the tracker's id of the run, so that a resumed run continues
    with this id. Rows after its checkpoint remain, because trackers cannot remove rows.

    Args:
        directory: directory of the run.
        about: description of the run.

    Raises:
        ConfigError: the tracker is not installed.
    """

    name: ClassVar[str]

    def __init__(self, directory: Path, about: About):
        try:
            self.module = self.load()
        except ImportError as error:
            raise ConfigError(
                f"report_to: {self.name} is not installed: pip install 'ed-trainers[{self.name}]', "
                "or remove it from report_to"
            ) from error
        self.directory, self.about = directory, about

    @staticmethod
    @abstractmethod
    def load() -> Any:
        """Import the tracker's module."""

    @abstractmethod
    def begin(self, run_id: str | None) -> str:
        """Start a run, or continue a run with a known id; return its id."""

    @abstractmethod
    def log(self, numbers: dict[str, float], step: int) -> None:
        """Log the numbers of a step."""

    def log_histograms(
        self, values: Mapping[str, tuple[list[float], list[float]]], step: int
    ) -> None:
        """Log counts and edges, if the tracker shows histograms; the record has them anyway."""
        del values, step

    @abstractmethod
    def close(self) -> None:
        """End the run."""

    def restart(self, rows: list[MetricRow]) -> None:
        """Start a run, or continue the run of the earlier rows."""
        number = self.directory / f"{self.name}.run"
        run_id = number.read_text().strip() if rows and number.exists() else None
        text = self.begin(run_id)
        number.parent.mkdir(parents=True, exist_ok=True)
        number.write_text(text)

    def write(self, row: MetricRow) -> None:
        """Log the numbers of a row."""
        self.log(curves(row), row["step"])
        self.log_histograms(histograms(row), row["step"])

    def flush(self) -> None:
        """Do nothing: trackers send rows without a flush."""
        return


class WandB(Tracker):
    """Weights & biases."""

    name = "wandb"

    @staticmethod
    def load() -> Any:
        import wandb  # pyright: ignore[reportMissingImports]

        return wandb

    def begin(self, run_id: str | None) -> str:
        number = run_id or uuid.uuid4().hex[:12]
        self.run = self.module.init(
            project=self.about.project,
            entity=self.about.entity,
            name=self.about.name,
            config=self.about.settings,
            id=number,
            resume="allow",
            dir=str(self.directory),
        )
        return number

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def write(self, row: MetricRow) -> None:
        """Log the numbers of a row, and a table of the completions of a preview."""
        super().write(row)
        samples = row.get("samples")
        if samples and self.about.shows_samples:
            columns = ["prompt", "completion"]
            cells = [[sample[name] for name in columns] for sample in samples]
            table = self.module.Table(columns=columns, data=cells)
            self.run.log({"samples": table}, step=row["step"])

    def log_histograms(
        self, values: Mapping[str, tuple[list[float], list[float]]], step: int
    ) -> None:
        if values:
            histogram = self.module.Histogram
            self.run.log({n: histogram(np_histogram=v) for n, v in values.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio(Tracker):
    """Trackio, which identifies a run by its name."""

    name = "trackio"

    @staticmethod
    def load() -> Any:
        import trackio  # pyright: ignore[reportMissingImports]

        return trackio

    def begin(self, run_id: str | None) -> str:
        number = run_id or f"{self.about.name}-{uuid.uuid4().hex[:6]}"
        space = {} if self.about.entity is None else {"space_id": self.about.entity}
        self.module.init(
            project=self.about.project,
            name=number,
            config=self.about.settings,
            resume="allow",
            **space,
        )
        return number

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.module.log(numbers, step=step)

    def close(self) -> None:
        self.module.finish()


class MLflow(Tracker):
    """MLflow, in which a project is an experiment."""

    name = "mlflow"

    @staticmethod
    def load() -> Any:
        import mlflow  # pyright: ignore[reportMissingImports]

        return mlflow

    def begin(self, run_id: str | None) -> str:
        self.module.set_experiment(self.about.project)
        run = self.module.start_run(run_id=run_id, run_name=None if run_id else self.about.name)
        if run_id is None:
            self.module.log_params(self.about.settings)
        self.number = run.info.run_id
        return self.number

    def log(self, numbers: dict[str, float], step: int) -> None:
        # By id, because mlflow's active run belongs to the thread that started it.
        self.module.log_metrics(numbers, step=step, run_id=self.number)

    def close(self) -> None:
        self.module.end_run()


#: Trackers by their names in `report_to`.
TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in (WandB, Trackio, MLflow)}
