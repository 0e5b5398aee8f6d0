"""`report.html`: one page about a run, without other files and without network access.

    python -m ed_trainers.report runs/quickstart

The page is built from the files in the directory of the run: `metrics.jsonl` and, if they exist,
`summary.json` (figures, samples, evaluation), `completions.jsonl` and `config.yaml`. Every number
of a row is a point of a curve, in the same chart as the evaluation with the prefix `eval_`. A run
with rewards begins with them.
"""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError

from ed_trainers.figures.metrics import COMPLETIONS, RECORD, MetricRow, read_metrics
from ed_trainers.options.optimizers import GRAD_NORMS, WEIGHTS
from ed_trainers.report import comparison

SUMMARY, CONFIG, PAGE = "summary.json", "config.yaml", "report.html"
#: Key of the summary: the evaluation before training.
EARLY_EVALUATION = "evaluation_before_training"
#: Key of the summary: what was trained, on which data and hardware, as texts by name.
RUN = "run"
#: Points of a curve; of longer ones each bucket keeps its lowest and its highest.
POINTS = 1500
#: Steps whose previews are shown, counted from the last.
PREVIEWS = 50
#: Keys of a row that are no curves: places on the axes.
_AXES = ("step", "time")
#: Prefixes of metrics of single parameters.
_OF_PARAMETERS = (f"{GRAD_NORMS}/", f"{WEIGHTS}/")
#: Metrics that are shown first, in this order; a name with `/` is the prefix of several.
_FIRST = (
    *("reward", "reward_std", "rewards/", "completions/"),
    *("loss", "perplexity", "grad_norm", "learning_rate", "tokens_per_second", "mfu"),
)
#: Completions that are shown, of the first and of the last step.
_SHOWN_COMPLETIONS = 16
_TIME = "%Y-%m-%d %H:%M"
_UNITS = (("h", 3600), ("min", 60), ("s", 1))


def write_report(directory: str | Path) -> Path:
    """Write `report.html` of a run into its directory, and return its path.

    Raises:
        ConfigError: the directory holds no metrics.
    """
    directory = Path(directory)
    rows = read_metrics(directory / RECORD)
    if not rows:
        raise ConfigError(
            f"{directory / RECORD} contains no metrics: pass the save_directory of a run that has "
            "done a step"
        )
    summary = _read_json(directory / SUMMARY)
    config = directory / CONFIG
    page = (files("ed_trainers.report") / "page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": html.escape(directory.resolve().name),
        "SUBTITLE": html.escape(_subtitle(rows)),
        "FIGURES": _figures(rows, summary),
        "COMPLETIONS": _completions(directory / COMPLETIONS),
        "SECTIONS": comparison.describe_branch(directory, rows)
        + comparison.describe_prediction(directory, rows)
        + _evaluation(summary)
        + _samples(summary)
        + _previews(rows)
        + _config(config),
        # A script ends at the first "</", even inside a string.
        "DATA": json.dumps(
            {"charts": charts(rows, comparison.read_parent_rows(directory))},
            separators=(",", ":"),
        ).replace("</", "<\\/"),
    }
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], page)
    target = directory / PAGE
    partial = target.with_name(f"{PAGE}.new")
    partial.write_text(page, encoding="utf-8")
    partial.replace(target)
    return target


def charts(
    rows: Sequence[MetricRow], parent_rows: Sequence[MetricRow] = ()
) -> list[dict[str, Any]]:
    """Return the charts: `{name, lines: [{label, points: [[step, seconds, value], ...]}]}`.

    A metric and its evaluation share a chart. A figure that was never finite has no chart. The
    values of single parameters, which are hundreds, have none either.

    Args:
        rows: metrics of the run.
        parent_rows: metrics of the run from which this run branches; their lines have the labels
            `parent training` and `parent evaluation`.
    """
    begin = next((row["time"] for row in (*parent_rows, *rows) if "time" in row), 0.0)
    curves: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for row, prefix in (*((r, "parent ") for r in parent_rows), *((r, "") for r in rows)):
        label = prefix + ("training" if "loss" in row else "evaluation")
        for key, value in row.items():
            if _is_hidden(key) or not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if math.isfinite(value):
                point = (row["step"], round(row.get("time", begin) - begin, 3), value)
                metric_curves = curves.setdefault(key.removeprefix("eval_"), {})
                metric_curves.setdefault(label, []).append(point)
    names = sorted(curves, key=lambda name: (_rank(name), name))
    return [
        {
            "name": name,
            "lines": [
                {"label": label, "points": thin_points(points)}
                for label, points in curves[name].items()
            ],
        }
        for name in names
    ]


def _rank(name: str) -> int:
    """Return the place of a metric among the charts and the tiles."""
    places = (n for n, first in enumerate(_FIRST) if name == first or _begins_with(name, first))
    return next(places, len(_FIRST))


def _begins_with(name: str, prefix: str) -> bool:
    return prefix.endswith("/") and name.startswith(prefix)


def _is_hidden(name: str) -> bool:
    """Return whether a value of a row has no chart: an axis, or a value of one parameter."""
    return name in _AXES or name.startswith(_OF_PARAMETERS)


def thin_points(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """At most `POINTS` points, spikes among them."""
    if len(points) <= POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / POINTS)
    selected_points: list[tuple[float, float, float]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        ends = {min(bucket, key=lambda p: p[2]), max(bucket, key=lambda p: p[2])}
        selected_points += sorted(ends)
    return selected_points


def _subtitle(rows: Sequence[MetricRow]) -> str:
    times = [row["time"] for row in rows if "time" in row]
    if not times:
        return f"{rows[-1]['step']:,} steps"
    began, ended = (time.strftime(_TIME, time.localtime(t)) for t in (min(times), max(times)))
    return f"{rows[-1]['step']:,} steps · {began} to {ended}"


def _figures(rows: Sequence[MetricRow], summary: Mapping[str, Any]) -> str:
    """Tiles with the facts and the figures of the summary, rewards first.

    Without a summary, the figures are the last of each curve.
    """
    figures = dict(summary.get("metrics") or {})
    if not figures:
        for row in rows:
            figures.update({key: value for key, value in row.items() if not _is_hidden(key)})
    bits = (summary.get("learned") or {}).get("bits_per_byte")
    if bits is not None:
        figures["bits_per_byte"] = bits
    facts = summary.get(RUN) or {}
    tiles = [('<div class="tile fact">', html.escape(str(facts[name])), name) for name in facts]
    tiles += [
        ('<div class="tile">', _number(name, figures[name]), name)
        for name in sorted(figures, key=lambda name: "reward" not in name)
        if isinstance(figures[name], int | float) and not isinstance(figures[name], bool)
    ]
    return "".join(f"{tag}<b>{x}</b><span>{_words(name)}</span></div>" for tag, x, name in tiles)


def _completions(path: Path) -> str:
    """Return a table of completions and rewards of the last step, and a folded one of the first."""
    if not path.is_file():
        return ""
    first: list[str] = []
    last: deque[str] = deque(maxlen=_SHOWN_COMPLETIONS)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if len(first) < _SHOWN_COMPLETIONS:
                first.append(line)
            last.append(line)
    early, late = _parse_rows(first), _parse_rows(last)
    early = [row for row in early if row["step"] == early[0]["step"]]
    late = [row for row in late if row["step"] == late[-1]["step"]]
    if not late:
        return ""
    page = f"<h2>Completions and rewards of step {late[0]['step']:,}</h2>{_rewarded(late)}"
    if early[0]["step"] != late[0]["step"]:
        title = f"step {early[0]['step']:,}"
        page += f"<details><summary>{title}</summary>{_rewarded(early)}</details>"
    return page


def _parse_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rows of lines; the last line of a killed run may be incomplete."""
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _rewarded(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of completions with their rewards, those of functions if several."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("rewards", ())))
    names = names if len(names) > 1 else []
    cells = []
    for row in rows:
        values = [row.get("reward"), *(row.get("rewards", {}).get(name) for name in names)]
        texts = [row["prompt"], row["completion"]]
        cells.append(
            ["" if value is None else _number("reward", value) for value in values]
            + [html.escape(_last_message(text)) for text in texts]
        )
    return _table("", ["reward", *map(_words, names), "prompt", "completion"], cells)


def _evaluation(summary: Mapping[str, Any]) -> str:
    """Return the table of the evaluation, with the values before training if there are any."""
    tasks, early = (summary.get(key) or {} for key in ("evaluation", EARLY_EVALUATION))
    cells = []
    for task, metrics in tasks.items():
        before = early.get(task, {})
        for name, value in metrics.items():
            row = [html.escape(task), html.escape(name), _number(name, value)]
            if early:
                row.append(_number(name, before[name]) if name in before else "")
            cells.append(row)
    head = ["task", "metric", "value", "before training"] if early else []
    return _table("Evaluation", head, cells)


def _table(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a heading, if there is a title, and a table of cells in HTML; empty without cells."""
    first = f"<tr><th>{'</th><th>'.join(head)}</th></tr>" if head else ""
    rows = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
    heading = f"<h2>{title}</h2>" if title else ""
    return f"{heading}<div class=scroll><table>{first}{rows}</table></div>" if cells else ""


def _samples(summary: Mapping[str, Any]) -> str:
    """Return the samples; those with a completion before training are rows of a table."""
    samples = summary.get("samples") or ()
    compared = [sample for sample in samples if "before" in sample]
    names = ["before", "completion"]
    names += ["expected"] if any("expected" in sample for sample in compared) else []
    cells = [
        [html.escape(_last_message(sample.get("prompt", "")))]
        + [html.escape(str(sample.get(name, ""))) for name in names]
        for sample in compared
    ]
    titles = {"before": "before training", "completion": "after training"}
    head = ["prompt", *(titles.get(name, name) for name in names)]
    samples_html = _texts([sample for sample in samples if "before" not in sample])
    return _table("Answers before and after training", head, cells) + (
        f"<h2>Samples</h2>{samples_html}" if samples_html else ""
    )


def _last_message(prompt: object) -> str:
    """Return a prompt, or the text of the last message of a conversation."""
    last = prompt[-1] if isinstance(prompt, Sequence) and prompt else prompt
    return str(last.get("content")) if isinstance(last, Mapping) else str(prompt)


def _previews(rows: Sequence[MetricRow]) -> str:
    """Return the samples of the model, the last steps first; earlier steps are folded."""
    previews = [row for row in rows if row.get("samples")][: -PREVIEWS - 1 : -1]
    preview_parts = [
        f"<details{' open' if row is previews[0] else ''}><summary>step {row['step']:,}</summary>"
        f"{_texts(row['samples'])}</details>"
        for row in previews
    ]
    return "<h2>Samples while training</h2>" + "".join(preview_parts) if preview_parts else ""


def _texts(samples: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"<pre><span class=prompt>{html.escape(str(sample.get('prompt', '')))}</span>"
        f"{html.escape(str(sample.get('completion', '')))}</pre>"
        for sample in samples
    )


def _config(path: Path) -> str:
    if not path.is_file():
        return ""
    text = html.escape(path.read_text(encoding="utf-8"))
    return (
        f"<h2>Configuration</h2><details><summary>{path.name}</summary><pre>{text}</pre></details>"
    )


def _words(name: str) -> str:
    return html.escape(name.replace("_", " "))


def _number(name: str, value: float) -> str:
    """Format a number with four digits; seconds in a readable unit."""
    if name.endswith("seconds"):
        unit_name, size = next(u for u in _UNITS if value >= 2 * u[1] or u is _UNITS[-1])
        return f"{value / size:.3g} {unit_name}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
