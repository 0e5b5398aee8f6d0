"""The record of a run: exact numbers, and no row lost or repeated by going back to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from ed_trainers.figures.metrics import COMPLETIONS, MetricsLog, read_metrics
from ed_trainers.figures.sinks import TensorBoard


def row(step, loss=1.0):
    return {"step": step, "loss": loss, "tokens": 10, "time": 1.7e9 + step}


def events(directory: Path) -> list[tuple[str, int, float]]:
    """Every scalar in a directory of event files, in order."""
    from tensorboardX.event_file_writer import EventsWriter  # noqa: F401 - the format's package
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(directory.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return found


def test_logged_floats_round_trip_exactly(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", active=True)
    log.restart(0)
    losses = np.random.default_rng(0).normal(size=100).astype(np.float32)
    for step, loss in enumerate(losses, 1):
        log.write(row(step, float(loss)))
    back = np.array([r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")], np.float32)
    np.testing.assert_array_equal(back, losses)


def test_non_finite_metrics_are_written_as_json_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", active=True)
    log.restart(0)
    log.write(row(1, float("nan")))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0)["loss"] is None


def test_restart_cuts_rows_beyond_the_checkpoint_and_a_torn_line(tmp_path):
    path, board = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    log = MetricsLog(path, [TensorBoard(board)], active=True)
    log.restart(0)
    for step in range(1, 8):
        log.write(row(step))
    log.write({"step": 4, "eval_loss": 2.0, "time": 1.7e9})
    # No close: a kill leaves this state, with a partial last line.
    with path.open("a") as file:
        file.write('{"step": 8, "lo')

    again = MetricsLog(path, [TensorBoard(board)], active=True)
    again.restart(5)
    assert again.last(evaluation=False)["step"] == 5
    assert again.last(evaluation=True)["eval_loss"] == 2.0
    for step in range(6, 10):
        again.write(row(step, 3.0))
    again.close()
    steps = [r["step"] for r in read_metrics(path) if "loss" in r]
    assert steps == list(range(1, 10))
    losses = [(step, value) for tag, step, value in events(board) if tag == "train/loss"]
    assert losses == [(s, 1.0 if s < 6 else 3.0) for s in range(1, 10)]
    assert [(s, v) for tag, s, v in events(board) if tag == "eval/loss"] == [(4, 2.0)]


def test_inactive_log_writes_no_files(tmp_path):
    log = MetricsLog(
        tmp_path / "metrics.jsonl", [TensorBoard(tmp_path / "tensorboard")], active=False
    )
    log.restart(0)
    log.write(row(1))
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert log.last(evaluation=False)["step"] == 1


def test_resumed_run_has_each_completion_once_in_the_file(tmp_path):
    def write(log, step, generation):
        return log.write_samples(step, [{"generation": generation, "prompt": "a"}] * 2)

    log = MetricsLog(tmp_path / "metrics.jsonl", active=True)
    log.restart(0)
    assert not (tmp_path / COMPLETIONS).exists()  # a method without samples has no file
    assert not log.write_samples(1, [])
    assert [write(log, *pair) for pair in ((1, 0), (2, 0), (3, 1))] == [True, False, True]
    log.close()
    again = MetricsLog(tmp_path / "metrics.jsonl", active=True)
    again.restart(2)
    assert [write(again, *pair) for pair in ((2, 0), (3, 1))] == [False, True]
    again.close()
    rows = read_metrics(tmp_path / COMPLETIONS)
    assert [(row["step"], row["generation"]) for row in rows] == [(1, 0)] * 2 + [(3, 1)] * 2
