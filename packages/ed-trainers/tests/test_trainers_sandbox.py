"""Commands in a sandbox end at their limits, leave no process, and have no network."""

import os
import time

import pytest
from ed_trainers.environments import Sandbox
from ed_trainers.environments.sandbox import blocks_network


def test_sandbox_returns_output_and_exit_code():
    code = "import sys; print(input(), flush=True); print('bad', file=sys.stderr); sys.exit(3)"
    result = Sandbox(seconds=30).python(code, "7\n")
    assert (result.output.split(), result.exit_code, result.stopped_by) == (["7", "bad"], 3, None)


def test_sandbox_stops_long_commands_and_their_children():
    began = time.monotonic()
    code = (
        "import os, time\n"
        "if os.fork() == 0: os.setsid()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)"
    )
    result = Sandbox(seconds=2).python(code)
    assert result.stopped_by == "time" and time.monotonic() - began < 30
    if blocks_network():  # then the processes have numbers of their own namespace
        return
    time.sleep(0.2)
    for number in map(int, result.output.split()[:1]):
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_sandbox_limits_output_memory_and_variables():
    large = Sandbox(seconds=30, output=1000).python("while True: print('x' * 100)")
    assert large.stopped_by == "output" and len(large.output) == 1000
    greedy = Sandbox(seconds=30, memory=2**28).python("x = bytearray(2**30)")
    assert "MemoryError" in greedy.output
    os.environ["EASYDEL_TEST_SECRET"] = "hidden"
    assert "hidden" not in Sandbox(seconds=30).python("import os; print(os.environ)").output


def test_sandbox_has_no_network_where_the_kernel_allows():
    code = (
        "import socket\n"
        "try: socket.create_connection(('127.0.0.1', PORT), 2); print('open')\n"
        "except OSError: print('closed')"
    )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1]))
        assert Sandbox(seconds=30, network=True).python(code).output.strip() == "open"
        if not blocks_network():
            pytest.skip("the kernel forbids new namespaces")
        assert Sandbox(seconds=30).python(code).output.strip() == "closed"
