"""`elarge data FILE`: a report on the mixture of a run file, before training."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from ed_data import data_report
from ed_esurge.command.program import Result, show_result
from ed_infra.errors import ConfigError

from ed_elarge.building.parts import other_inputs
from ed_elarge.building.stored_config import get_sequence_length
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.model import eLargeModel


def show_data(path: str, output: Path | None, with_near_duplicates: bool, samples: int) -> Result:
    """Print the report and write it as an HTML page.

    Args:
        path: The run file.
        output: The file of the page. None writes `data.html` to the trainer's directory; without a
            trainer no page is written.
        with_near_duplicates: Whether to find nearly equal documents.
        samples: The number of rows to show.

    Raises:
        InputError: The run file is invalid.
        DataError: The data is invalid.
        ConfigError: The page cannot be written.
    """
    run = normalize(nodes.read_yaml(path), require_actions=False)
    if run.mixture is None:
        raise run.missing("mixture")
    elm = eLargeModel.from_run(run)
    with run.blame("mixture"):
        report = data_report(
            run.mixture,
            elm.build_tokenizer(),
            batch_size=run.batch_size,
            seq_length=get_sequence_length(run),
            seed=run.mixture.seed or 0,
            schema=run.schema,
            **other_inputs(elm),
            with_near_duplicates=with_near_duplicates,
            samples=samples,
        )
    show_result(report.text(colour=sys.stdout.isatty()))
    result = Result(dataclasses.asdict(report))
    if output is None and run.trainer is not None:
        output = run.directory / "data.html"
    if output is None:
        return result
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(report.html(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {str(output)!r} cannot be written: {error.strerror}"
        ) from error
    print(f"\nwrote {output}")
    return result
