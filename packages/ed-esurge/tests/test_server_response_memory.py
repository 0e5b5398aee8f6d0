"""Limits of stored and background responses hold at every moment, and their bytes are counted."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref

import httpx
import pytest
from ed_esurge.server.app import create_app
from ed_esurge.server.detached import DetachedAnswer, DetachedAnswers
from ed_esurge.server.responses.run import ResponseRun
from ed_esurge.testing import ScriptedEngine

LONG = "a" * 20_000  # a thread parses and encodes the request


def serve(engine, **limits):
    app = create_app(engine, limits=limits)
    transport = httpx.ASGITransport(app)
    return app.state.server.state, httpx.AsyncClient(transport=transport, base_url="http://a")


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


def test_concurrent_background_requests_do_not_exceed_their_limit():
    async def work():
        engine = ScriptedEngine(delay=0.05, max_model_len=2**16)
        state, client = serve(engine, max_background_responses=3)
        body = {"input": LONG, "background": True}
        async with client:
            many = await asyncio.gather(
                *(client.post("/v1/responses", json=body) for _ in range(12))
            )
            assert sorted(one.status_code for one in many) == [200] * 3 + [429] * 9
            wrong = await client.post("/v1/responses", json={**body, "previous_response_id": "a"})
            assert wrong.status_code == 429
            await state.detached.close()
            # A request that fails leaves its place.
            for _ in range(4):
                wrong = {**body, "previous_response_id": "a"}
                assert (await client.post("/v1/responses", json=wrong)).status_code == 404
            again = await client.post("/v1/responses", json=body)
            assert again.status_code == 200
            await state.detached.close()
        assert state.budget.used == 0

    asyncio.run(work())


@pytest.mark.nightly
def test_bytes_of_background_responses_are_counted_until_and_after_their_end(monkeypatch):
    runs = []
    initialize = ResponseRun.__init__

    def recorded(self, *args):
        initialize(self, *args)
        runs.append(weakref.ref(self))

    monkeypatch.setattr(ResponseRun, "__init__", recorded)

    async def work():
        engine = ScriptedEngine(lambda prompt, _: "x" * 5000, delay=0.01, max_model_len=2**16)
        state, client = serve(engine)
        body = {"input": LONG, "instructions": "b" * 9000, "background": True}
        async with client:
            created = (await client.post("/v1/responses", json=body)).json()
            await until(lambda: engine.requests)
            assert state.budget.used >= len(LONG) + 9000
            path = f"/v1/responses/{created['id']}"
            before = (await client.get(path)).json()
            assert before["status"] == "in_progress"
            cancelled = (await client.post(f"{path}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            assert (await client.get(path)).json() == cancelled
            stored = state.responses.get(created["id"], "")
            assert stored.live is None and stored.answer.task is None
            events = stored.answer.stored_bytes
            assert events > 9000
            parts = [*stored.text, *stored.messages, stored.facts, stored.items]
            assert stored.size == events + sum(map(len, parts))
            assert state.responses._bytes == stored.size > 2 * len(LONG) + events
            assert state.budget.used == 0
            gc.collect()
            assert [run() for run in runs] == [None]
            assert (await client.delete(path)).status_code == 200
            assert state.responses._bytes == 0

    asyncio.run(work())


def test_ended_work_frees_its_frames_and_its_place():
    class Large:
        pass

    async def work():
        answers, place_owner = DetachedAnswers(1), "a"
        answer, large = DetachedAnswer(), Large()
        alive = weakref.ref(large)

        async def wait(kept):
            await asyncio.sleep(60)
            assert kept

        with answers.claim(place_owner) as place:
            answers.start(answer, lambda kept=large: wait(kept), place.pop_all())
        await asyncio.sleep(0)
        await asyncio.gather(answer.cancel(), answer.cancel())
        del large, place
        gc.collect()
        assert answer.ended and answer.task is None and alive() is None
        with answers.claim(place_owner):
            pass

    asyncio.run(work())


def test_conversations_share_their_messages_and_have_a_limit():
    async def work():
        engine = ScriptedEngine(max_model_len=2**18)
        state, client = serve(engine, max_conversation_bytes=2**16)
        call = {"type": "function_call", "call_id": "c", "name": "f"}
        async with client:
            previous, sizes = None, []
            for _ in range(9):
                items = [
                    {"role": "user", "content": "a"},
                    {**call, "arguments": json.dumps({"a": "b" * 15_000})},
                    {"type": "function_call_output", "call_id": "c", "output": "d"},
                ]
                body = {"input": items, "previous_response_id": previous}
                answer = await client.post("/v1/responses", json=body)
                if answer.status_code != 200:
                    break
                stored = state.responses.get(answer.json()["id"], "")
                if previous is not None:
                    earlier = state.responses.get(previous, "").messages
                    assert all(
                        one is other for one, other in zip(stored.messages, earlier, strict=False)
                    )
                    assert len(stored.messages) == len(earlier) + 1
                previous = answer.json()["id"]
                sizes.append(stored.conversation_bytes)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "conversation_too_long"
            assert "max_conversation_bytes" in error["message"]
            assert len(sizes) == 4 and max(sizes) < 2**16 + 20_000
            counted = await client.post(
                "/v1/responses/input_tokens", json={"input": LONG, "previous_response_id": previous}
            )
            assert counted.status_code == 400
        assert state.budget.used == 0

    asyncio.run(work())
