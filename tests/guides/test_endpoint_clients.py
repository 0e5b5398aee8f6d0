"""The official clients in the tables of endpoints reach the endpoints of their rows."""

from __future__ import annotations

import io
import re
import time
import wave
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.launch import background
from ed_esurge.server.stores import OPEN
from ed_esurge.speech.engine import SpeechEngine
from ed_esurge.testing import ScriptedEngine, ScriptedTranscriber

from tests.guides.test_endpoint_tables import rows

#: Without `--model-dir`, the server stores no models. It never transfers models. The scripted model
#: for speech does not translate. `test_server_model_directory.py` and `test_server_audio.py` test
#: these endpoints with the same clients.
REFUSED = {"/v1/audio/translations"} | {
    f"/api/{name}" for name in ("create", "copy", "delete", "pull", "push", "blobs/{digest}")
}
Hooks = dict[str, list[Callable[..., Any]]]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def with_openai(url: str, recorded: Hooks) -> None:
    http = openai.DefaultHttpxClient(event_hooks=recorded)
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)
    client.models.retrieve(client.models.list().data[0].id)
    client.completions.create(model="scripted", prompt="a")
    client.chat.completions.create(model="scripted", messages=MESSAGES)
    client.embeddings.create(model="scripted", input="a")
    client.responses.input_tokens.count(model="scripted", input="a")
    for cancelled in (True, False):
        answer = client.responses.create(model="scripted", input="a", background=cancelled)
        if cancelled:
            client.responses.cancel(answer.id)
    client.responses.retrieve(answer.id)
    assert client.responses.input_items.list(answer.id).data
    client.responses.delete(answer.id)
    # The paths of llama.cpp's server without a version.
    root = client.with_options(base_url=url.removesuffix("/v1"))
    assert root.models.list().data
    root.chat.completions.create(model="scripted", messages=MESSAGES)
    root.responses.create(model="scripted", input="a")
    root.responses.input_tokens.count(model="scripted", input="a")
    root.audio.transcriptions.create(model="speech", file=("a.wav", recording()))
    client.audio.transcriptions.create(model="speech", file=("a.wav", recording()))
    with pytest.raises(openai.BadRequestError, match="translate"):
        client.audio.translations.create(model="speech", file=("a.wav", recording()))
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'
    )
    file = client.files.create(file=("a.jsonl", line), purpose="batch")
    assert [one.id for one in client.files.list()] == [file.id]
    assert client.files.content(file.id).content == line
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert [one.id for one in client.batches.list()] == [batch.id]
    with suppress(openai.ConflictError):  # the batch may have ended
        client.batches.cancel(batch.id)
    ends = time.monotonic() + 30
    while client.batches.retrieve(batch.id).status in OPEN:  # it reads its file
        assert time.monotonic() < ends, "the batch did not end within 30 s"
        time.sleep(0.01)
    client.files.retrieve(file.id)
    client.files.delete(file.id)


def with_anthropic(url: str, recorded: Hooks) -> None:
    root = url.removesuffix("/v1")
    http = anthropic.DefaultHttpxClient(event_hooks=recorded)
    client = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0, http_client=http)
    client.messages.create(model="scripted", messages=MESSAGES, max_tokens=4)
    client.messages.count_tokens(model="scripted", messages=MESSAGES)


def with_ollama(url: str, recorded: Hooks) -> None:
    client = ollama.Client(host=url.removesuffix("/v1"), event_hooks=recorded)

    client.chat("scripted", MESSAGES)
    client.generate("scripted", "a")
    client.embed("scripted", "a")
    client.embeddings("scripted", "a")
    client.list()
    client.ps()
    client.show("scripted")
    refused: list[Callable[[], object]] = [
        lambda: client.create("new", from_="scripted"),
        lambda: client.copy("scripted", "new"),
        lambda: client.delete("new"),
        lambda: client.pull("new"),
        lambda: client.push("new"),
        lambda: client.create_blob(Path(__file__)),
    ]
    for ask in refused:
        with pytest.raises(ollama.ResponseError):
            ask()


def recording() -> bytes:
    """Return a WAV file of one second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(bytes(32_000))
    return file.getvalue()


def template_of(path: str) -> str:
    """Return the path of the endpoint that answers a path."""
    paths = sorted((one.path for one in list_endpoints()), key=lambda one: one.count("{"))
    return next(one for one in paths if re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", one), path))


@pytest.mark.parametrize(
    ("name", "run"),
    [("openai", with_openai), ("anthropic", with_anthropic), ("ollama", with_ollama)],
    ids=["openai", "anthropic", "ollama"],
)
def test_official_clients_reach_exactly_the_endpoints_of_their_rows(
    name: str, run: Callable[[str, Hooks], None], tmp_path: Path
) -> None:
    reached: dict[str, int] = {}

    def record(answer: Any) -> None:
        reached[template_of(answer.request.url.path)] = answer.status_code

    engines: Any = {"scripted": ScriptedEngine()}
    if name == "openai":
        engines["speech"] = SpeechEngine(ScriptedTranscriber())
    with background(engines, batch_directory=tmp_path) as url:
        run(url, {"response": [record]})
    listed = {path for _, paths, _, client in rows() for path in paths if client == name}
    assert reached.keys() == listed
    for path, status in reached.items():
        if path not in REFUSED and not path.endswith("/cancel"):
            assert status < 300, (path, status)


def test_every_present_row_names_a_client() -> None:
    for table, paths, what, client in rows():
        absent = what.startswith("absent")
        known = {""} if absent else {"openai", "anthropic", "ollama", "Chromium", "-"}
        assert client in known, (table, paths)
