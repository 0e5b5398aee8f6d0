"""An engine serves with one generic shape while a thread compiles the others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from ed_esurge import AsyncEngine, SamplingParams, eSurge
from ed_esurge.core.plan import StepPlan
from ed_esurge.frontends.library.loading import release_engine
from ed_esurge.runner.background import INTERRUPTED, BackgroundCompilation
from ed_esurge.runner.functions import Functions

PROMPTS = [[5, 6, 7], [9], [*range(3, 43)]]
OPTIONS = {
    "max_num_seqs": 2,
    "max_num_seq_buckets": [2],
    "max_num_batched_tokens": 32,
    "min_input_pad": 8,
    "page_size": 8,
    "max_model_len": 64,
    "silent_mode": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BIASED = GREEDY.replace(logit_bias={7: 3.0}, prompt_logprobs=1)


def answers(engine, params=GREEDY):
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, params)]


@pytest.fixture
def gate(monkeypatch):
    """An event that lets the thread compile."""
    event, compile_one = threading.Event(), Functions._compile_one

    def gated(functions, name):
        event.wait(120)
        return compile_one(functions, name)

    monkeypatch.setattr(Functions, "_compile_one", gated)
    yield event
    event.set()


@pytest.fixture
def widths(monkeypatch):
    """The numbers of tokens of the planned steps."""
    counts: list[int] = []
    init = StepPlan.__init__

    def counted(plan, *args, **fields):
        init(plan, *args, **fields)
        counts.append(plan.total)

    monkeypatch.setattr(StepPlan, "__init__", counted)
    return counts


@pytest.fixture(scope="module")
def expected(make_llama):
    engine = eSurge(make_llama(num_hidden_layers=1), compile_runner=False, **OPTIONS)
    return answers(engine)


@pytest.mark.nightly
def test_generic_shape_computes_the_same_tokens_before_other_shapes_are_compiled(
    make_llama, expected, gate, widths
):
    engine = eSurge(make_llama(num_hidden_layers=1), compile_in_background=True, **OPTIONS)
    before = engine.stats()
    assert before["programs_pending"] > 0
    widths.clear()
    assert answers(engine) == expected
    assert max(widths) == 8, "prompts are split into steps of the generic shape"
    after = engine.stats()
    assert (after["num_compiled"], after["recompiles"]) == (before["num_compiled"], 0)
    gate.set()
    engine.terminate()  # ends the thread


@pytest.mark.nightly
def test_compiled_shapes_replace_the_generic_shape_without_compilation_by_requests(
    make_llama, expected, gate, widths
):
    engine = eSurge(make_llama(num_hidden_layers=1), compile_in_background=True, **OPTIONS)
    gate.set()
    biased = answers(engine, BIASED)  # waits for small programs
    until = time.monotonic() + 300
    while engine.stats()["programs_pending"] and time.monotonic() < until:
        assert answers(engine) == expected
    widths.clear()
    engine.reset_prefix_cache()
    assert answers(engine) == expected
    assert max(widths) > 8, "steps have all tokens again"
    assert answers(engine, BIASED) == biased
    assert engine.stats()["recompiles"] == 0
    functions = engine.loop.runner.functions
    assert functions.missing() == []


@pytest.mark.nightly
def test_released_engine_compiles_no_further_program(make_llama, gate):
    engine = AsyncEngine(
        eSurge(make_llama(num_hidden_layers=1), compile_in_background=True, **OPTIONS)
    )
    functions = engine.engine.loop.runner.functions
    engine.start()
    asyncio.run(release_engine(engine))  # does not wait for the program in work
    assert len(functions.background) > 1
    gate.set()
    functions.background.stop()
    assert len(functions.background) == 0
    assert len(functions.missing()) > 1


def test_thread_that_fails_or_stops_leaves_programs_to_the_caller():
    first, release = threading.Event(), threading.Event()

    def compile_one(name):
        first.set()
        release.wait(60)
        if name == "broken":
            raise RuntimeError("no memory")
        return len

    thread = BackgroundCompilation(["good", "broken", "late"], compile_one, threading.Lock)
    assert first.wait(60)
    assert ("late" in thread, "other" in thread, len(thread)) == (True, False, 3)
    waiting: list[object] = []
    taker = threading.Thread(target=lambda: waiting.append(thread.take("broken")))
    taker.start()
    release.set()
    taker.join(60)
    thread.stop()
    assert waiting == [None]
    assert (thread.take("other"), len(thread)) == (None, 0)


def test_second_interrupt_ends_a_process_that_waits_for_a_compilation(tmp_path):
    """No traceback, and no abort of a thread that still compiles."""
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, signal, threading\n"
        "from ed_esurge.runner.background import BackgroundCompilation\n"
        "started = threading.Event()\n"
        "def compile_one(name):\n"
        "    started.set()\n"
        "    threading.Event().wait(60)\n"
        "BackgroundCompilation(['step'], compile_one, contextlib.nullcontext)\n"
        "started.wait()\n"
        "main = threading.main_thread().ident\n"
        "timer = threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT])\n"
        "timer.daemon = True\n"
        "timer.start()\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "")
