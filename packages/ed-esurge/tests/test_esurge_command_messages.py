"""Commands print the messages of every module of this project."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import logging, sys
from ed_infra.logging import get_logger

def work(source: str = ""):
    get_logger("ed_esurge.engine.setup").warning("a warning of the engine")
    get_logger("ed_esurge.engine.surge").info("sizes of the engine")
    get_logger("ed_models.checkpoints").warning("a warning of the model")
    logging.getLogger("ed_esurge.server.launch").info("a message of the server")
    logging.getLogger("ed_data").warning("a warning of the data")
    return 0
"""
ESURGE = """
from ed_esurge.command import main as command
command._load = lambda name: work
sys.exit(command.main([{command!r}, "--source", "x", *{more!r}]))
"""
WARNINGS = ["a warning of the engine", "a warning of the model", "a warning of the data"]


def read_messages(code: str) -> list[str]:
    command = [sys.executable, "-c", RUN + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()


@pytest.mark.parametrize("command", ["serve", "chat", "run-batch", "join", "bench"])
def test_every_esurge_command_prints_messages_of_engine_and_server(command: str) -> None:
    messages = read_messages(ESURGE.format(command=command, more=[]))
    details = ["sizes of the engine", "a message of the server"]
    assert sorted(messages) == sorted([*WARNINGS, *details])


def test_quiet_command_prints_only_warnings() -> None:
    messages = read_messages(ESURGE.format(command="bench", more=["--quiet"]))
    assert sorted(messages) == sorted(WARNINGS)
