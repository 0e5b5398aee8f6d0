"""Transcriptions of several clients take turns, and one client does not block the others."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ed_esurge.speech.engine import SpeechEngine
from ed_esurge.speech.options import TranscriptionOptions
from ed_esurge.speech.samples import QueueFullError
from ed_esurge.speech.turns import DeviceTurns, RoundRobin, TurnPlaces
from ed_esurge.testing import ScriptedTranscriber
from numpy import zeros


def test_clients_are_served_round_robin():
    waiting: RoundRobin[int] = RoundRobin()
    for number, client in enumerate("aaabbc"):
        waiting.push(client, number)
    order = [waiting.pop() for _ in range(6)]
    assert order == [("a", 0), ("b", 3), ("c", 5), ("a", 1), ("b", 4), ("a", 2)]
    assert waiting.pop() is None


def test_short_work_of_another_client_runs_within_long_work():
    turns, order = DeviceTurns(), []
    waits = threading.Event()

    def short() -> None:
        waits.set()
        with turns.turn("b"):
            order.append("b")

    with turns.turn("a"):
        thread = threading.Thread(target=short)
        thread.start()
        waits.wait()
        while not len(turns._waiting):
            pass
        order.append("a")
        turns.yield_turn("a")
        order.append("a")
    thread.join()
    assert order == ["a", "b", "a"]


def test_one_client_uses_half_of_the_places_and_of_the_queue():
    async def check() -> None:
        places = TurnPlaces(4)
        for _ in range(2):
            await places.enter("a", 8)
        waiting = [asyncio.create_task(places.enter("a", 8)) for _ in range(2)]
        await asyncio.sleep(0)
        assert (places.num_running, places.num_waiting) == (2, 2)
        with pytest.raises(QueueFullError, match="2 transcriptions run and 2 wait; the limit is 8"):
            await places.enter("a", 8)
        await places.enter("b", 8)
        places.leave("a")
        await waiting[0]
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert places.num_waiting == 0
        for client in "aab":
            places.leave(client)
        assert places.num_running == 0

    asyncio.run(check())


def test_closed_generator_ends_the_thread_and_frees_the_place():
    async def check() -> None:
        model = ScriptedTranscriber(delay=0.02)
        engine = SpeechEngine(model)
        pieces = engine.transcribe(zeros(16000 * 500, "f4"), TranscriptionOptions())
        first = await anext(pieces)
        assert first.text == "word0"
        await pieces.aclose()
        for _ in range(100):
            if not engine.replica_stats()[0]["num_requests_running"]:
                break
            await asyncio.sleep(0.02)
        assert engine.replica_stats()[0] == {"num_requests_running": 0, "num_requests_waiting": 0}
        assert model.attempts < 50

    asyncio.run(check())


def test_short_recording_does_not_wait_for_long_recordings():
    async def check() -> None:
        model = ScriptedTranscriber(delay=0.01)
        engine = SpeechEngine(model)

        async def last(seconds: int, client: str):
            samples = zeros(16000 * seconds, "f4")
            options = TranscriptionOptions()
            return [one async for one in engine.transcribe(samples, options, client=client)][-1]

        long = [asyncio.create_task(last(100, "long")) for _ in range(4)]
        await asyncio.sleep(0.1)
        before = model.attempts
        assert (await last(2, "short")).text == "word0 word1"
        assert model.attempts - before < 20
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)

    asyncio.run(check())
