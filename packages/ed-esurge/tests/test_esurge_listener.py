"""Strangers cannot end a listener, and hold few of its threads, files and seconds."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from ed_esurge.engine import connection as connections
from ed_esurge.engine import listener as listeners
from ed_esurge.engine.connection import Connection, VersionError
from ed_esurge.engine.listener import MAX_PENDING, Listener
from ed_infra.errors import EasyDeLError

SECRET = b"a secret of this test"
#: Echoes one message of each connection. The first argument is the number of file descriptors, the
#: second line of the input makes the process use all of them, and the third frees them.
ECHO = """
import os, resource, sys
from ed_esurge.engine.listener import Listener

def echo(connection):
    connection.send(connection.receive())

listener = Listener("127.0.0.1:0", b"a secret of this test", echo, limit=2**20)
files = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
print(listener.address, flush=True)
sys.stdin.readline()
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    print("full", flush=True)
sys.stdin.readline()
for each in held:
    os.close(each)
print("free", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def echo():
    """Yield a process of `ECHO` with few file descriptors, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", ECHO, "128"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def ask(address: str, value: object) -> object:
    """Return the echo of a value."""
    connection = Connection.open(address, SECRET)
    connection.send(value)
    answer = connection.receive(60)
    connection.close()
    return answer


@pytest.mark.nightly
def test_more_strangers_than_files_do_not_end_the_listener(echo):
    process, address = echo
    strangers = [connect(address) for _ in range(400)]
    assert ask(address, "during the attack") == "during the attack"
    for stranger in strangers:
        stranger.close()
    assert ask(address, "after the attack") == "after the attack"
    assert process.poll() is None


def test_listener_without_free_files_accepts_when_files_are_free(echo):
    process, address = echo
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "full\n"
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(ask(address, "late")))
    waiting.start()
    time.sleep(1)
    assert not answers
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "free\n"
    waiting.join(60)
    assert answers == ["late"]


@pytest.fixture
def listener():
    """Yield a listener in this process that echoes one message."""
    one = Listener("127.0.0.1:0", SECRET, lambda c: c.send(c.receive()), limit=2**20)
    yield one
    one.close()


@pytest.mark.nightly
def test_strangers_hold_a_bounded_number_of_threads_and_connections(listener):
    before = threading.active_count()
    strangers = [connect(listener.address) for _ in range(5 * MAX_PENDING)]
    most = 0
    for _ in range(20):
        most = max(most, threading.active_count() - before)
        assert ask(listener.address, 1) == 1
    # Threads of connections that were just closed or answered may not have ended yet.
    assert most <= MAX_PENDING + 8
    assert len(listener._pending) <= MAX_PENDING
    for stranger in strangers:
        stranger.close()


@pytest.mark.daily("first message")
@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        (32).to_bytes(8, "big") + bytes(32),
        (32).to_bytes(8, "big") + bytes(32) + (4096).to_bytes(8, "big"),
        (32).to_bytes(8, "big"),
    ],
    ids=["nothing", "first message", "second message", "length"],
)
def test_slow_greeting_ends_at_one_deadline(listener, greeting, monkeypatch):
    monkeypatch.setattr(connections, "GREETING_SECONDS", 1.0)
    stranger = connect(listener.address)
    stranger.sendall(greeting)
    ended = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            while True:
                stranger.sendall(b"\0")
                time.sleep(0.05)
        ended.set()

    threading.Thread(target=drip, daemon=True).start()
    assert ended.wait(30)
    assert ask(listener.address, 2) == 2


def test_errors_of_accept_and_of_threads_do_not_end_the_listener(listener, monkeypatch):
    count = 0
    start = threading.Thread.start

    def fail(thread):
        nonlocal count
        if getattr(thread, "_target", None) == listener._serve and count < 3:
            count += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert ask(listener.address, 3) == 3
    assert count == 3 and not listener._pending


def test_messages_beyond_the_limit_end_only_their_connection(listener):
    connection = Connection.open(listener.address, SECRET)
    for _ in range(64):
        with suppress(EasyDeLError):
            connection.send(b"a" * 2**21)
    with pytest.raises(EasyDeLError):
        connection.receive(60)
    assert ask(listener.address, 4) == 4


def test_ends_of_different_versions_reject_each_other(listener, monkeypatch):
    warnings = []
    monkeypatch.setattr(listeners.logger, "warning", lambda text, *more: warnings.append(more))
    versions = connections._versions()
    monkeypatch.setattr(connections, "_versions", lambda: dict(versions))
    for name, value in (("version", "0.0.1"), ("messages", "other"), ("program", "x")):
        sent = {**versions, name: value}
        replaced = []

        def choose(sent=sent, replaced=replaced):
            """Return other versions in the end that connects, which greets first."""
            here = threading.current_thread() is threading.main_thread()
            replaced.append(here)
            return sent if here else dict(versions)

        monkeypatch.setattr(connections, "_versions", choose)
        with pytest.raises(VersionError, match="install the same version"):
            Connection.open(listener.address, SECRET)
        assert True in replaced
    monkeypatch.setattr(connections, "_versions", lambda: versions)
    assert ask(listener.address, 5) == 5
    assert any("install the same version" in str(more) for more in warnings)
