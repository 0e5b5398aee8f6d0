"""Commands that talk with a model: `elarge chat`, and EasyLM's `lm_eval_json`."""

from __future__ import annotations

import builtins
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ed_elarge.command.main import app
from ed_elarge.easylm.commands import lm_eval_json as main
from ed_elarge.easylm.json_evaluation import REQUEST_KINDS, evaluate_files
from ed_infra.errors import ConfigError
from typer.testing import CliRunner

INPUT = {
    "prefix": ["The cat sat", "", "one, two, "],
    "text": [" on the mat.", "A sentence alone.", "three"],
    "until": [["\n"], ["."], ["\n"]],
}


@contextmanager
def engine_of(folder: Path) -> Iterator[Any]:
    """An engine of a saved model."""
    import jax.numpy as jnp
    from ed_esurge.engine.surge import eSurge
    from ed_models.families.llama import LlamaForCausalLM
    from transformers import AutoTokenizer

    dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    model = LlamaForCausalLM.from_pretrained(folder, sharding_axis_dims=(1,) * 5, **dtypes)
    options = {"max_model_len": 64, "page_size": 16, "compile_runner": False}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with eSurge(model, tokenizer, silent_mode=True, **options) as engine:
        yield engine


@pytest.mark.nightly
def test_chat_answers_like_the_engine_until_the_input_ends(
    quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ed_esurge import SamplingParams

    flags = ["--max-model-len", "64", "--page-size", "16", "--no-compile-runner"]
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    messages: list[dict[str, str]] = []
    with engine_of(quickstart_model) as engine:
        for text in ("The", "A class"):
            messages.append({"role": "user", "content": text})
            answer = engine.chat(messages, greedy).outputs[0].text
            messages.append({"role": "assistant", "content": answer})
    expected = [message["content"] for message in messages[1::2]]
    lines = iter(["The", "/nothing", "", "A class"])

    def read(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    words = ["chat", str(quickstart_model), "--temperature", "0", "--max-tokens", "6", *flags]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout == "".join(f"{text}\n" for text in expected)
    assert "no such command: /nothing" in done.stderr


def test_chat_without_a_model_fails_with_a_usage_message() -> None:
    done = CliRunner().invoke(app, ["chat"])
    assert done.exit_code == 2
    assert "SOURCE" in done.stderr.upper()


# lm_eval_json.


class Server:
    """A server with EasyLM's endpoints that records the requests."""

    def __init__(self) -> None:
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((self.path, body))
                count = len(next(iter(body.values())))
                lists = {
                    "log_likelihood": [-float(i) for i in range(count)],
                    "is_greedy": [bool(i % 2) for i in range(count)],
                    "output_text": [f"{self.path} {i}" for i in range(count)],
                }
                status = 413 if "too long" in str(body) else 200
                reply = b"at most 64 tokens" if status == 413 else json.dumps(lists).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize("kind", REQUEST_KINDS)
def test_lm_eval_json_sends_batches_and_joins_the_answers(server: Server, kind: str) -> None:
    answer = evaluate_files(INPUT, kind, server.url + "/", batch_size=2)
    paths = {path for path, _ in server.asked}
    assert paths == {f"/{kind.replace('_', '-')}"}
    names = {"prefix": "prefix_text", "text": "text", "until": "until"}
    for name in REQUEST_KINDS[kind].reads:
        sent = [value for _, body in server.asked for value in body[names[name]]]
        assert sent == INPUT[name] == answer[name]
    first, second = (body for _, body in server.asked)
    assert [len(next(iter(body.values()))) for body in (first, second)] == [2, 1]
    if kind.startswith("loglikelihood"):
        assert answer["loglikelihood"] == [0.0, -1.0, 0.0]
        assert answer["is_greedy"] == [False, True, False]
    else:
        path = f"/{kind.replace('_', '-')}"
        assert answer["output_text"] == [f"{path} 0", f"{path} 1", f"{path} 0"]


def test_lm_eval_json_reports_invalid_input(server: Server, tmp_path: Path) -> None:
    for given, kind, words in [
        (INPUT, "loglikelyhood", "did you mean 'loglikelihood'"),
        ({"prefix": ["a"]}, "loglikelihood", "needs the list 'text'"),
        ({"prefix": ["a"], "text": ["b", "c"]}, "loglikelihood", "different lengths"),
        ({"prefix": ["a"], "text": ["too long"]}, "loglikelihood", "status 413: at most 64"),
    ]:
        with pytest.raises(ConfigError, match=words):
            evaluate_files(given, kind, server.url)
    with pytest.raises(ConfigError, match="cannot be reached"):
        evaluate_files(INPUT, "generate", "http://127.0.0.1:1")


def test_lm_eval_json_command_writes_the_answers(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(INPUT))
    words = [f"--input={source}", f"--output={target}", f"--lm_client.url={server.url}"]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--eval_type=greedy_until"])
    assert stopped.value.code == 0
    answers = json.loads(target.read_text())
    assert answers["prefix"] == INPUT["prefix"] and len(answers["output_text"]) == 3
    assert str(target) in capsys.readouterr().out
    source.write_text("{")
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code != 0
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.nightly
def test_lm_eval_json_of_a_served_model_equals_the_engine(
    quickstart_model: Path,
) -> None:
    from ed_esurge import eSurgeLM
    from ed_esurge.server.launch import background
    from lm_eval.api.instance import Instance

    with engine_of(quickstart_model) as engine:
        pairs = zip(INPUT["prefix"], INPUT["text"], strict=True)
        asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
        expected = eSurgeLM(engine).loglikelihood(asked, disable_tqdm=True)
        with background(engine) as url:
            answer = evaluate_files(
                INPUT, "loglikelihood", str(url).removesuffix("/v1"), batch_size=2
            )
    scores = [score for score, _ in expected]
    assert answer["loglikelihood"] == pytest.approx(scores, rel=1e-4)
    assert answer["is_greedy"] == [greedy for _, greedy in expected]
