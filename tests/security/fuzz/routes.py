"""Fuzzers of routes, with a real server in this process and real connections."""

from __future__ import annotations

import base64
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ed_esurge.server.http.errors import MAX_MESSAGE
from ed_esurge.server.launch import background
from ed_esurge.speech.engine import SpeechEngine
from ed_esurge.testing import (
    TOOL_TEMPLATE,
    ScriptedEngine,
    ScriptedTranscriber,
    byte_tokenizer,
)

from tests.security.fuzz.mutations import mutate_bytes, mutate_json, write_json
from tests.security.fuzz.targets import ErrorLog, Target, check, read_seeds

#: Statuses of refusals. 500 is never one of them.
REFUSALS = frozenset((400, 401, 403, 404, 405, 409, 411, 413, 415, 421, 422, 429, 431, 501, 503))
#: Seconds after which a request hangs.
HANG = 120.0


class Route(Target):
    """A target that a client reaches over HTTP. A case is a path and a body."""

    refusals = REFUSALS
    options: dict[str, Any] = {}

    def build_engine(self) -> Any:
        """Return the engine of the server."""
        return ScriptedEngine(tokenizer=byte_tokenizer(TOOL_TEMPLATE), max_model_len=2**14)

    def build_options(self, folder: Path) -> dict[str, Any]:
        """Return the options of the server."""
        return {"batch_directory": folder / "batches", **self.options}

    @contextmanager
    def running(self, folder: Path) -> Iterator[object]:
        with (
            background(self.build_engine(), **self.build_options(folder)) as url,
            httpx.Client(base_url=url.removesuffix("/v1"), timeout=HANG) as self.client,
            ErrorLog() as self.log,
        ):
            yield url

    def load_seeds(self) -> list[Any]:
        return [json.loads(data) for data in read_seeds(self.name)]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        case = rng.choice(corpus)
        body = case["body"]
        if isinstance(body, bytes):
            return {**case, "body": mutate_bytes(body, rng)}
        bodies = [other["body"] for other in corpus if not isinstance(other["body"], bytes)]
        body = mutate_json(body, rng, bodies)
        return {**case, "body": body if rng.random() < 0.7 else write_json(body, rng)}

    def execute(self, case: Any) -> str:
        body = case["body"]
        if not isinstance(body, bytes):
            body = json.dumps(body).encode("utf-8", "surrogatepass")
        headers = {"Content-Type": "application/json"}
        answer = self.client.request(
            case.get("method", "POST"), case["path"], content=body, headers=headers
        )
        return self.check_answer(answer)

    def check_answer(self, answer: httpx.Response) -> str:
        """Return the outcome of an answer: the status, and the message without its details."""
        status, text = answer.status_code, answer.text
        check(not self.log.texts, f"the server logged an error: {self.log.texts[-1:]}")
        check("Traceback (most recent" not in text, f"a traceback in the answer: {text[:2000]}")
        check(status < 300 or status in self.refusals, f"status {status}: {text[:500]}")
        if status < 300:
            broken = 'data: {"error"' in text and '"code":500' in text.replace(" ", "")
            check(not broken, f"a stream with the error 500: {text[:2000]}")
            return f"{status} {answer.headers.get('content-type', '')}"
        check(len(answer.content) < 4 * MAX_MESSAGE, f"an error of {len(answer.content)} bytes")
        return f"{status} {re.sub(r'[0-9]+|[^ ]{30,}', '#', text)[:120]}"


class Responses(Route):
    """`/v1/responses` and its sub-routes."""

    name = "responses"


class Ollama(Route):
    """Ollama's API."""

    name = "ollama"


class Mcp(Route):
    """MCP tools: requests, calls that a model writes, and replies of a hostile MCP server.

    The body of a case has the request, the text that the model writes, and the lines with which
    the MCP server replies to `tools/list` and `tools/call`.
    """

    name = "mcp"
    refusals = REFUSALS | {502, 504}  # of the MCP server

    def build_engine(self) -> Any:
        self.text = ""
        return ScriptedEngine(
            lambda prompt, choice: self._take_text(),
            tokenizer=byte_tokenizer(TOOL_TEMPLATE),
            max_model_len=2**18,
        )

    def _take_text(self) -> str:
        """Return the text of the model, which writes its calls once."""
        text, self.text = self.text, "Done."
        return text

    def build_options(self, folder: Path) -> dict[str, Any]:
        self._lines = folder / "lines.json"
        program = str(Path(__file__).with_name("hostile_mcp_server.py"))
        server = {"command": sys.executable, "args": [program, str(self._lines)], "timeout": 10}
        config = folder / "mcp.json"
        config.write_text(
            json.dumps({"mcpServers": {"hostile": {**server, "require_approval": "never"}}})
        )
        return {"mcp_config": config}

    def execute(self, case: Any) -> str:
        body = case["body"]
        if not isinstance(body, dict) or not isinstance(body.get("request"), dict):
            return "no request"
        text = body.get("model_text")
        self.text = (text if isinstance(text, str) else json.dumps(text)) or "Done."
        self._lines.write_text(
            json.dumps({key: body.get(key) for key in ("list", "call")}), encoding="utf-8"
        )
        return super().execute({"path": "/v1/responses", "body": body["request"]})

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        case = rng.choice(corpus)
        body = case["body"]
        key = rng.choice(["request", "model_text", "list", "call"])
        others = [other["body"][key] for other in corpus]
        return {**case, "body": {**body, key: mutate_json(body[key], rng, others)}}


class Batches(Route):
    """Files and batches: uploaded lines are executed to the end."""

    name = "batches"
    options = {"limits": {"max_batch_requests": 50, "max_files": 1000}}

    def load_seeds(self) -> list[Any]:
        return [{"path": "/v1/files", "body": data} for data in read_seeds(self.name)]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        data = rng.choice(corpus)["body"]
        lines = data.split(b"\n")
        place = rng.randrange(len(lines))
        try:
            line = mutate_json(json.loads(lines[place]), rng)
            lines[place] = write_json(line, rng)
        except ValueError:
            lines[place] = mutate_bytes(lines[place], rng)
        data = b"\n".join(lines)
        return {
            "path": "/v1/files",
            "body": mutate_bytes(data, rng) if rng.random() < 0.1 else data,
        }

    def execute(self, case: Any) -> str:
        data = case["body"]
        answer = self.client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)}
        )
        outcome = self.check_answer(answer)
        if answer.status_code != 200:
            return f"file {outcome}"
        names = [answer.json()["id"]]
        endpoint = re.search(rb'"url": ?"(/v1/[a-z/]+)"', data)
        body = {
            "input_file_id": names[0],
            "endpoint": endpoint[1].decode() if endpoint else "/v1/completions",
            "completion_window": "24h",
        }
        answer = self.client.post("/v1/batches", json=body)
        outcome = self.check_answer(answer)
        if answer.status_code == 200:
            batch, end = answer.json(), time.monotonic() + HANG
            while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
                check(time.monotonic() < end, f"the batch does not end: {batch}")
                time.sleep(0.005)
                batch = self.client.get(f"/v1/batches/{batch['id']}").json()
            outcome = f"{batch['status']} {batch['request_counts']}"
            names += [batch[key] for key in ("output_file_id", "error_file_id") if batch.get(key)]
            for name in names[1:]:
                content = self.client.get(f"/v1/files/{name}/content").text
                for line in content.splitlines():
                    response = json.loads(line).get("response") or {}
                    check(response.get("status_code") != 500, f"a line with status 500: {line}")
                    check("Traceback (most" not in line, f"a line with a traceback: {line}")
        for name in names:
            self.client.delete(f"/v1/files/{name}")
        check(not self.log.texts, f"the server logged an error: {self.log.texts[-1:]}")
        return outcome


class FakeProcessor:
    """One feature per 8 x 8 pixels; the pixel values are the mean color of the image."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.image_token = tokenizer, "<image>"

    def _merge_kwargs(self, **options: Any) -> dict[str, Any]:
        return {"images_kwargs": options}

    def _process_images(self, images: Any, *, return_tensors: str) -> Any:
        colors = [np.asarray(image, np.float32).mean((0, 1)) for image in images]
        counts = [max(1, min(image.height * image.width // 64, 64)) for image in images]
        pixels = np.array([color[:, None, None] for color in colors])
        return {"pixel_values": pixels}, [self.image_token * count for count in counts]


class VisionEngine(ScriptedEngine):
    """A scripted engine that accepts images."""

    input_names = ("input_ids", "pixel_values")
    TEMPLATE = (
        "{% for message in messages %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )

    def __init__(self) -> None:
        tokenizer = byte_tokenizer(self.TEMPLATE)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        super().__init__(lambda prompt, choice: "seen", tokenizer=tokenizer)
        self.processor = FakeProcessor(tokenizer)


class Images(Route):
    """Encoded images in chat requests."""

    name = "images"

    def build_engine(self) -> Any:
        return VisionEngine()

    def load_seeds(self) -> list[Any]:
        return [{"path": "/v1/chat/completions", "body": data} for data in read_seeds(self.name)]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        bodies = [case["body"] for case in corpus]
        return {**corpus[0], "body": mutate_bytes(rng.choice(bodies), rng, bodies)}

    def execute(self, case: Any) -> str:
        url = "data:;base64," + base64.b64encode(case["body"]).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        return super().execute({"path": case["path"], "body": body})


class Recordings(Route):
    """Audio files of transcriptions."""

    name = "audio"
    options = {"limits": {"max_audio_seconds": 20, "max_audio_bytes": 2**20}}

    def build_engine(self) -> Any:
        return SpeechEngine(ScriptedTranscriber(), "speech")

    def build_options(self, folder: Path) -> dict[str, Any]:
        return dict(self.options)

    def load_seeds(self) -> list[Any]:
        return [{"body": data} for data in read_seeds(self.name)]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        bodies = [case["body"] for case in corpus]
        return {"body": mutate_bytes(rng.choice(bodies), rng, bodies)}

    def execute(self, case: Any) -> str:
        answer = self.client.post("/v1/audio/transcriptions", files={"file": case["body"]})
        return self.check_answer(answer)
