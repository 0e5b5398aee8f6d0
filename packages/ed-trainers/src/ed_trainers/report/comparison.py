"""Sections of a report that compare a run: with its parent, and with a prediction of its loss.

`elarge branch` writes `branch.json` and the metrics of the parent, `elarge ladder` writes
`prediction.json`, both into the directory of the run.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ed_trainers.figures.metrics import MetricRow, read_metrics

#: The record of a branch, the metrics of its parent, and the prediction of a loss.
BRANCH, PARENT_METRICS, PREDICTION = "branch.json", "parent_metrics.jsonl", "prediction.json"
#: Metrics of the tables: those of a run that two runs share.
_COMPARED = ("loss", "eval_loss", "perplexity", "eval_perplexity", "reward", "grad_norm")


def read_parent_rows(directory: Path) -> list[MetricRow]:
    """Return the metrics of the parent of a branch; none for other runs."""
    return list(read_metrics(directory / PARENT_METRICS))


def describe_branch(directory: Path, rows: Sequence[MetricRow]) -> str:
    """Return the section about the parent of a branch as HTML; empty for other runs.

    Args:
        directory: directory of the branch.
        rows: metrics of the branch.
    """
    record = _read_json(directory / BRANCH)
    if not record:
        return ""
    changes = [
        [html.escape(key), html.escape(_show(old)), html.escape(_show(new))]
        for key, (old, new) in record.get("changes", {}).items()
    ]
    parent = html.escape(str(record["run"]))
    page = f"<h2>Branch of {parent} at step {record['step']:,}</h2>"
    page += _table(["changed key", "parent", "branch"], changes) or "<p>No value changes.</p>"
    sides = (read_parent_rows(directory), rows)
    last = [_last_values(side) for side in sides]
    cells = [
        [html.escape(name), *(_format(values.get(name)) for values in last)]
        for name in _COMPARED
        if any(name in values for values in last)
    ]
    at_branch = record.get("evaluation") or {}
    cells += [
        [f"{html.escape(name)} at the branch", _format(value), _format(value)]
        for name, value in at_branch.items()
    ]
    page += _table(["last value", "parent", "branch"], cells)
    samples = [
        [
            _format(sample.get("at_branch")),
            _format(sample.get("at_end")),
            _format(sample.get("step")),
            html.escape(_show(sample.get("prompt", ""))),
            html.escape(str(sample.get("completion", ""))),
        ]
        for sample in record.get("samples") or ()
    ]
    head = ["log-probability at the branch", "at its end", "written in step", "prompt", "sample"]
    return page + _table(head, samples)


def grade_prediction(directory: Path, rows: Sequence[MetricRow]) -> dict[str, Any]:
    """Return a prediction with the loss of the run; empty without a prediction or that loss.

    Args:
        directory: directory of the run.
        rows: metrics of the run.

    Returns:
        The content of `prediction.json`, with `actual` (the last value of the predicted metric),
        `error` (actual minus predicted), `is_inside` (of the interval) and `is_complete` (whether
        the run has done the predicted steps).
    """
    prediction = _read_json(directory / PREDICTION)
    loss = prediction.get("loss") or {}
    values = [row[loss["metric"]] for row in rows if loss.get("metric") in row]
    if not values:
        return {}
    share = max(round(len(values) * float(loss.get("share", 0.0))), 1)
    actual = sum(values[-share:]) / share
    steps = prediction.get("target", {}).get("steps")
    return prediction | {
        "actual": actual,
        "error": actual - loss["value"],
        "is_inside": loss["low"] <= actual <= loss["high"],
        "is_complete": steps is None or rows[-1]["step"] >= steps,
    }


def describe_prediction(directory: Path, rows: Sequence[MetricRow]) -> str:
    """Return the section that grades a prediction as HTML; empty without a prediction."""
    grade = grade_prediction(directory, rows)
    if not grade:
        return ""
    loss = grade["loss"]
    interval = f"{loss['low']:.4g} to {loss['high']:.4g}"
    verdict = "inside" if grade["is_inside"] else "outside"
    if not grade["is_complete"]:
        verdict = "the run has not done all predicted steps"
    cells = [
        [f"predicted {html.escape(loss['metric'])}", _format(loss["value"])],
        [f"interval of {loss['level']:.0%}", interval],
        ["value of the run", _format(grade["actual"])],
        ["error", f"{grade['error']:+.4g}"],
        ["verdict", verdict],
    ]
    rungs = [
        [
            _format(rung["parameters"]),
            _format(rung["tokens"]),
            f"{rung['flops']:.3g}",
            f"{rung['learning_rate']:.3g}",
            _format(rung["batch_size"]),
            _format(rung["loss"]),
        ]
        for rung in grade.get("rungs") or ()
    ]
    head = ["parameters", "tokens", "FLOPs", "learning rate", "batch", "loss"]
    return f"<h2>Prediction before the run</h2>{_table([], cells)}{_table(head, rungs)}"


def _last_values(rows: Sequence[MetricRow]) -> dict[str, float]:
    values: dict[str, float] = {}
    for row in rows:
        values.update((name, row[name]) for name in _COMPARED if row.get(name) is not None)
    return values


def _format(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else html.escape(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _show(value: object) -> str:
    if isinstance(value, Sequence) and value and isinstance(value[-1], Mapping):
        return str(value[-1].get("content"))
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a table of cells in HTML; empty without cells."""
    first = f"<tr><th>{'</th><th>'.join(head)}</th></tr>" if head else ""
    lines = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
    return f"<div class=scroll><table>{first}{lines}</table></div>" if cells else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
