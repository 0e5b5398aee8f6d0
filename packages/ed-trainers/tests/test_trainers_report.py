"""`report.html`: its content, drawn by a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ed_infra.errors import ConfigError
from ed_trainers.report import POINTS, charts, thin_points, write_report

ROWS: list[dict[str, Any]] = [
    {"step": 1, "time": 100.0, "loss": 5.0, "grad_norm": 1.0},
    {"step": 2, "time": 101.5, "loss": 4.0, "grad_norm": None},
    {"step": 2, "time": 101.9, "eval_loss": 4.5},
]


def a_run(folder: Path, rows: list[dict[str, Any]] = ROWS, **summary: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("model: {name: </script><b>}\n")
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.nightly
def test_report_charts_training_and_evaluation_curves() -> None:
    loss, norm = charts(ROWS)
    assert [loss["name"], norm["name"]] == ["loss", "grad_norm"]
    training, evaluation = loss["lines"]
    assert training == {"label": "training", "points": [(1, 0.0, 5.0), (2, 1.5, 4.0)]}
    assert evaluation == {"label": "evaluation", "points": [(2, 1.9, 4.5)]}
    assert norm["lines"][0]["points"] == [(1, 0.0, 1.0)]


def test_long_curves_keep_their_spikes() -> None:
    points = [(i, i / 10, 1.0) for i in range(100_000)]
    points[77_777] = (77_777, 7777.7, 9.0)
    points[11_111] = (11_111, 1111.1, -9.0)
    kept = thin_points(points)
    assert len(kept) <= POINTS + 2
    assert points[77_777] in kept and points[11_111] in kept
    assert kept == sorted(kept)


def test_report_escapes_samples_and_evaluation_text(tmp_path: Path) -> None:
    samples = [{"prompt": "<i>", "completion": "& {{DATA}}"}]
    evaluation = {"heldout": {"acc": 0.25}}
    run = a_run(
        tmp_path / "a<b", metrics={"seconds": 7200.0}, samples=samples, evaluation=evaluation
    )
    page = write_report(run).read_text()
    for text in ("&lt;i&gt;", "&amp; {{DATA}}", "a&lt;b", "<b>2 h</b>", "0.25", "&lt;/script&gt;"):
        assert text in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_report_without_metrics_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no metrics"):
        write_report(tmp_path)


def test_report_of_a_run_with_rewards_begins_with_them(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": 1.0, "reward": n / 2, "rewards/exact/mean": 0.5} for n in (1, 2)]
    facts = {"model": "a/<b>", "data": "sums.jsonl", "hardware": "1 x cpu, 2 cores"}
    run = a_run(tmp_path / "run", rows, metrics={"steps": 2, "eval_reward": 1.0}, run=facts)
    first = {"step": 1, "generation": 0, "prompt": "1 + 1 =", "completion": " 3", "reward": 0.0}
    chat = [{"role": "user", "content": "2 & 2"}]
    scores = {"exact": 1.0, "length": None}
    later = {**first, "step": 2, "prompt": chat, "completion": chat, "reward": 1, "rewards": scores}
    lines = "".join(json.dumps(row) + "\n" for row in (first, later))
    (run / "completions.jsonl").write_text(lines + '{"step": 3')
    page = write_report(run).read_text()
    assert [chart["name"] for chart in charts(rows)] == ["reward", "rewards/exact/mean", "loss"]
    parts = ["a/&lt;b&gt;", "sums.jsonl", "1 x cpu", "eval reward", "steps</span>"]
    parts += [
        "rewards of step 2",
        "<th>exact</th><th>length</th>",
        "2 &amp; 2",
        "step 1",
        "1 + 1 =",
    ]
    parts.append("<h2>Curves</h2>")
    places = [page.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.nightly
def test_browser_renders_report_charts(tmp_path: Path) -> None:
    page = write_report(a_run(tmp_path / "run"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    said = subprocess.run(
        ["chromium", *options, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert len(re.findall("<svg", said.stdout)) == len(charts(ROWS))
    assert "<output>4 · 4.5</output>" in said.stdout


def test_report_of_a_branch_has_both_curves_and_the_changed_keys(tmp_path: Path) -> None:
    run = a_run(tmp_path / "branch")
    parent = [ROWS[0], {**ROWS[1], "loss": 4.25}]
    (run / "parent_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in parent))
    sample = {"prompt": "<p>", "completion": "c", "at_branch": -1.5, "at_end": -1.25}
    record = {
        "run": "runs/<parent>",
        "step": 1,
        "changes": {"trainer.learning_rate": [0.1, 0.2]},
        "evaluation": {"eval_loss": 5.5},
        "samples": [sample],
    }
    (run / "branch.json").write_text(json.dumps(record))
    page = write_report(run).read_text()
    assert "Branch of runs/&lt;parent&gt; at step 1" in page
    assert "<td>trainer.learning_rate</td><td>0.1</td><td>0.2</td>" in page
    assert "<td>loss</td><td>4.25</td><td>4</td>" in page
    assert "<td>-1.5</td><td>-1.25</td>" in page
    data = re.search(r'id="data">(.*?)</script>', page)
    assert data is not None
    lines = json.loads(data[1])["charts"][0]["lines"]
    assert [line["label"] for line in lines] == ["parent training", "training", "evaluation"]
    assert lines[0]["points"][-1] == [2, 1.5, 4.25]


@pytest.mark.parametrize(
    ("steps", "low", "verdict"),
    [(2, 4.4, "inside"), (2, 4.6, "outside"), (9, 4.4, "the run has not done all predicted steps")],
)
def test_report_grades_the_prediction_of_a_loss(
    tmp_path: Path, steps: int, low: float, verdict: str
) -> None:
    run = a_run(tmp_path / "run")
    rung = {"parameters": 1000, "tokens": 64, "flops": 1e6, "learning_rate": 0.1, "batch_size": 4}
    loss = {"metric": "eval_loss", "share": 0.0, "value": 4.7, "low": low, "high": 5, "level": 0.9}
    prediction = {"loss": loss, "target": {"steps": steps}, "rungs": [{**rung, "loss": 5.5}]}
    (run / "prediction.json").write_text(json.dumps(prediction))
    page = write_report(run).read_text()
    assert f"<td>verdict</td><td>{verdict}</td>" in page
    assert "<td>value of the run</td><td>4.5</td>" in page
    assert "<td>error</td><td>-0.2</td>" in page
