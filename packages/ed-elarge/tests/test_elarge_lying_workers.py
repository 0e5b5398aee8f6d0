"""Strangers and lying workers end neither the trainer nor the tasks of other workers."""

from __future__ import annotations

import math
import socket
import threading
import time

import numpy as np
import pytest
from ed_elarge.asynchronous.message_check import TaskLimits, WorkerMessageError, read_task
from ed_elarge.asynchronous.workers import RunWorkers
from ed_esurge.engine.channel import SECRET
from ed_esurge.engine.connection import Connection, ConnectionLost
from ed_esurge.engine.listener import MAX_PENDING

LIMITS = TaskLimits(vocab_size=100, room=8, token_count=0, version=3, copies=2)
SAMPLE = {
    "do": "done",
    "task": "sample",
    "name": "0/1",
    "tokens": [1, 2],
    "logprobs": [-1.0, -math.inf],
    "masks": [np.array([1, 4], np.int32), np.array([], np.int32)],
    "experts": np.zeros((3, 2, 1), np.int16),
    "version": 3,
    "ended": True,
}
TURN = {"do": "done", "task": "turn", "name": "0/0", "ends": False, "done": False, "reward": 0.5}
TURN = {**TURN, "tokens": [3, 4]}
SCORE = {"do": "done", "task": "score", "name": "0/0", "rewards": [[1.0], [math.nan]]}


@pytest.mark.parametrize("message", [SAMPLE, TURN, SCORE], ids=lambda one: one["task"])
def test_honest_results_are_accepted(message):
    role = "engine" if message["task"] == "sample" else "environment"
    kind, key = read_task(message, role)
    assert kind == message["task"] and key[0] == 0
    LIMITS.check(kind, message)


def test_turns_have_a_reward_exactly_if_the_run_has_an_environment():
    tools = TaskLimits(100, 8, 0, 3, 2, has_reward=False)
    tools.check("turn", {**TURN, "reward": None})
    with pytest.raises(WorkerMessageError, match="a reward that is no number"):
        tools.check("turn", TURN)


LIES = [
    (SAMPLE, "tokens", value)
    for value in ([100, 1], [-1, 1], [1.0, 2], [True, 2], [1] * 9, "ab", None, [1])
]
LIES += [
    (SAMPLE, "logprobs", value) for value in ([-1.0], [math.nan, 0.0], [1, 2], None, [math.inf] * 2)
]
LIES += [(SAMPLE, "version", value) for value in (4, -1, 1.0, None, 10**30)]
LIES += [(SAMPLE, "ended", None)]
LIES += [
    (SAMPLE, "masks", value)
    for value in (
        [np.array([1], np.int32)],
        [np.array([100], np.int32)] * 2,
        [np.array([-1], np.int32)] * 2,
        [np.array([1], np.float32)] * 2,
        [[1], [2]],
    )
]
LIES += [(SAMPLE, "experts", value) for value in ([1], np.zeros((2, 2), np.int16), np.zeros(3))]
LIES += [(TURN, name, None) for name in ("ends", "done", "reward", "tokens")]
LIES += [(TURN, "tokens", [1] * 9), (TURN, "tokens", [100])]
LIES += [
    (SCORE, "rewards", value)
    for value in (None, [[1.0]], [[1.0], [1.0, 2.0]], [1.0, 2.0], [["a"], ["b"]], [[1.0]] * 3)
]


@pytest.mark.parametrize(("message", "name", "value"), LIES, ids=str)
def test_invalid_results_are_rejected(message, name, value):
    changed = {**message, name: value}
    with pytest.raises(WorkerMessageError):
        LIMITS.check(message["task"], changed)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "turn"},
        {"task": []},
        {"task": None},
        {"do": "explode"},
        {"name": "0"},
        {"name": "0/1/2"},
        {"name": "-1/0"},
        {"name": "٣/1"},
        {"name": 7},
        {"name": "9" * 5000 + "/1"},
        {"do": "failed"},
        {"do": "failed", "text": 5},
    ],
    ids=str,
)
def test_messages_without_a_task_are_rejected(change):
    with pytest.raises(WorkerMessageError):
        read_task({**SAMPLE, **change}, "engine")
    for message in (None, [], 1, "a"):
        with pytest.raises(WorkerMessageError):
            read_task(message, "engine")


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Yield the workers of a run, and the events of their callbacks."""
    monkeypatch.setenv(SECRET, "a secret of this test")
    events = []

    def on_message(worker, message):
        read_task(message, worker.role)
        events.append(("message", worker))

    run = RunWorkers(
        {"engine": 0},
        "127.0.0.1:0",
        {"file": "a"},
        tmp_path,
        on_ready=lambda worker: events.append(("ready", worker)),
        on_message=on_message,
        on_lost=lambda worker: events.append(("lost", worker)),
    )
    yield run, events
    run.close()


def join(run) -> Connection:
    connection = Connection.open(run.address, b"a secret of this test")
    connection.send({"do": "hello", "role": "engine"})
    assert connection.receive(30) == {"file": "a"}
    connection.send({"do": "ready"})
    return connection


def wait_for(events, kind: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while sum(event == kind for event, _ in events) < count:
        assert time.monotonic() < deadline, events
        time.sleep(0.01)


def test_strangers_do_not_keep_a_worker_from_joining(workers):
    run, events = workers
    before = threading.active_count()
    host, port = run.address.split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(4 * MAX_PENDING)]
    connection = join(run)
    wait_for(events, "ready", 1)
    assert threading.active_count() - before <= MAX_PENDING + 8
    for stranger in strangers:
        stranger.close()
    connection.close()
    wait_for(events, "lost", 1)


@pytest.mark.parametrize(
    "message", [None, [1], {"do": "done"}, {**SAMPLE, "name": "x"}, {**SAMPLE, "task": "score"}]
)
def test_lying_worker_is_lost_and_another_works(workers, message):
    run, events = workers
    honest, liar = join(run), join(run)
    wait_for(events, "ready", 2)
    liar.send(message)
    with pytest.raises(ConnectionLost):
        liar.receive(30)
    wait_for(events, "lost", 1)
    honest.send({**SAMPLE, "do": "part"})
    wait_for(events, "message", 1)
    honest.close()


@pytest.mark.parametrize("hello", [None, [], {"role": "chief"}, {"role": ["engine"]}, {}])
def test_worker_without_a_role_is_rejected(workers, hello):
    run, events = workers
    connection = Connection.open(run.address, b"a secret of this test")
    connection.send(hello)
    with pytest.raises(ConnectionLost):
        connection.receive(30)
    assert not events
    join(run).close()
    wait_for(events, "ready", 1)
