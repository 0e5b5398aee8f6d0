"""Attacks of public advisories about other engines, repeated against this project.

`docs/advisories.md` lists the advisories. Classes of attacks that a package tests are not
repeated here.
"""

from __future__ import annotations

import ast
import functools
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from ed_esurge.core.prefix_cache import page_key
from ed_esurge.replies.parser import Calls, ReplyParser
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_esurge.server.http import auth
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra.testing import tiny_llama
from ed_models import AutoEasyDeLConfig
from ed_models.checkpoints.tokenizers import load_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError, UndefinedError
from packaging.version import Version

from tests.security.fuzz.routes import VisionEngine
from tools.workspace import ROOT, read_toml

KEY = "a-secret-key"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
#: Modules that may unpickle, and the reason why the sender is trusted.
UNPICKLERS = {
    "ed_data/tokens/worker.py": "reads the pipe of the parent process",
    "ed_infra/compilation/programs.py": "reads files that only this user can write",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that requires a key."""
    with background(ScriptedEngine(), api_key=KEY) as address:
        yield address


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        yield client


def raw(url: str, head: str, body: bytes = b"") -> bytes:
    """Return the answer to raw bytes."""
    place = httpx.URL(url)
    with socket.create_connection((place.host, place.port or 80), timeout=30) as client:
        client.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def called(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the functions that a module calls, with their modules, and the names of
    the classes that it extends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            names = [node.func]
        elif isinstance(node, ast.ClassDef):
            names = node.bases
        else:
            continue
        for name in names:
            if isinstance(name, ast.Name):
                yield name.id
            elif isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name):
                yield f"{name.value.id}.{name.attr}"


@functools.cache
def calls() -> dict[str, frozenset[str]]:
    """Return the called and extended names of each module of the packages."""
    return {
        file.relative_to(ROOT).as_posix().split("/src/")[1]: frozenset(
            called(ast.parse(file.read_text(encoding="utf-8")))
        )
        for file in sorted(ROOT.glob("packages/*/src/**/*.py"))
    }


def test_only_listed_modules_unpickle() -> None:
    loads = {"pickle.load", "pickle.loads", "marshal.loads"}
    unpicklers = {
        module
        for module, names in calls().items()
        if loads & names or any(name.endswith(".Unpickler") for name in names)
    }
    assert unpicklers == set(UNPICKLERS)


def test_no_module_evaluates_text_as_code() -> None:
    evaluating = {"eval", "exec", "compile"}
    assert not {name for name, names in calls().items() if evaluating & names}


def test_yaml_is_always_loaded_safely() -> None:
    unsafe = {"yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all"}
    assert not {name for name, names in calls().items() if unsafe & names}


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "//v1/models",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/v1/models?x=/health",
        "/v1/models#/health",
        "http://127.0.0.1/v1/models",
        "http://127.0.0.1/health/../v1/models",
        "/V1/MODELS",
        "/v1/models/",
        "/v1%2fmodels",
    ],
)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1/health?", "localhost/health#"])
def test_path_and_host_variants_do_not_bypass_the_key_check(
    url: str, target: str, host: str
) -> None:
    answer = raw(url, f"GET {target} HTTP/1.1\nHost: {host}\nConnection: close\n")
    assert answer.split(b" ", 2)[1] in (b"400", b"401", b"404", b"421"), answer
    assert b'"owned_by"' not in answer


@pytest.mark.parametrize("field", ["n", "best_of", "max_tokens", "logprobs", "top_k", "seed"])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, -(2**63), 1.5, True, "1" * 5000])
def test_every_numeric_request_field_has_bounds(
    http: httpx.Client, field: str, value: object
) -> None:
    body = {"prompt": "a", "max_tokens": 1, field: value}
    answer = http.post("completions", json=body)
    harmless = field == "seed" and isinstance(value, int)
    assert answer.status_code == 400 or (harmless and answer.status_code == 200), answer.text
    assert len(answer.content) < 4096


@pytest.mark.parametrize(
    "field",
    [
        {"prompt_embeds": "gASVAAAA"},
        {"logits_processors": [{"qualname": "os.system"}]},
        {"custom_logit_processor": "gASVAAAA"},
        {"chat_template": "{{ ''.__class__.__mro__ }}"},
        {"mm_processor_kwargs": {"size": 10**9}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_with_code_or_objects_are_rejected(
    http: httpx.Client, field: dict[str, object]
) -> None:
    assert http.post("chat/completions", json={**CHAT, **field}).status_code == 400


@pytest.mark.parametrize("prompt", ["", [], [[]], ["", ""], [""], {}, None])
def test_empty_prompt_does_not_stop_the_server(http: httpx.Client, prompt: object) -> None:
    answer = http.post("completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code in (200, 400), answer.text
    assert http.post("completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_keys_are_compared_as_digests_in_constant_time(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare))
    for guess in ("x", KEY[:-1], KEY + "x", "é" * 500, KEY):
        headers = {b"Authorization": f"Bearer {guess}".encode()}
        status = 200 if guess == KEY else 401
        assert http.get("models", headers=headers).status_code == status
    assert len(compared) >= 5
    assert set(compared) == {(32, 32)}


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=16), st.data())
def test_prefix_key_depends_on_every_token_and_the_salt(
    tokens: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[place] = (changed[place] + 1) % 2**31
    assert page_key(b"", tokens) == page_key(b"", [*tokens])
    assert page_key(b"", tokens) != page_key(b"", changed)
    assert page_key(b"a", tokens) != page_key(b"b", tokens)
    assert len(page_key(b"", tokens)) == 16


def test_minimum_versions_of_http_libraries_are_fixed_releases() -> None:
    project = read_toml(ROOT / "packages/ed-esurge/pyproject.toml")["project"]
    floors = dict(one.split(">=") for one in project["dependencies"] if "," not in one)
    assert Version(floors["starlette"]) >= Version("0.49.1")
    assert Version(floors["h11"]) >= Version("0.16")


@pytest.mark.parametrize(
    "variable", ["tokenize", "chat_template", "tokenizer_kwargs", "return_tensors", "max_length"]
)
def test_template_variables_cannot_replace_renderer_arguments(
    http: httpx.Client, variable: str
) -> None:
    body = {**CHAT, "chat_template_kwargs": {variable: True}}
    answer = http.post("chat/completions", json=body)
    assert answer.status_code == 400
    assert variable in answer.json()["error"]["message"]


@pytest.mark.parametrize("sees", [True, False])
def test_server_does_not_download_addresses_in_requests(sees: bool) -> None:
    """Checks images and files by URL, and Markdown images in a text."""
    asked = threading.Event()
    with (
        background(VisionEngine() if sees else ScriptedEngine()) as url,
        httpx.Client(base_url=url, timeout=30) as http,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.settimeout(0.5)

        def watch() -> None:
            try:
                listener.accept()[0].close()
                asked.set()
            except TimeoutError:
                pass

        watcher = threading.Thread(target=watch)
        watcher.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        parts = [
            {"type": "image_url", "image_url": {"url": address}},
            {"type": "video_url", "video_url": {"url": address}},
            {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
            {"type": "file", "file": {"file_data": address}},
            {"type": "text", "text": f"![an image]({address})"},
        ]
        for part in parts:
            body = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
            answer = http.post("chat/completions", json=body)
            accepted = part["type"] == "text"
            assert answer.status_code == (200 if accepted else 400), answer.text
        http.post("responses", json={"input": f"![an image]({address})", "max_output_tokens": 16})
        watcher.join()
    assert not asked.is_set()


@pytest.mark.parametrize("size", [400_000, 4_000_000])
def test_request_header_size_is_limited(url: str, size: int) -> None:
    try:
        answer = raw(url, f"GET /health HTTP/1.1\nHost: localhost\nX-Long: {'a' * size}\n")
    except OSError:  # the server closes the connection while the client still sends
        answer = b""
    assert not answer or answer.split(b" ", 2)[1] in (b"400", b"431"), answer[:200]
    assert httpx.get(url.replace("/v1", "/health"), timeout=60).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages|attr('__class__')|attr('__base__') }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% set x = messages.append %}{{ x.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{{ lipsum.__globals__['os'] }}",
    ],
)
def test_chat_template_cannot_access_the_interpreter(template: str) -> None:
    conversation = [{"role": "user", "content": "a"}]
    try:
        text, _ = ChatTemplate(byte_tokenizer(), template).render(conversation)
    except (SecurityError, UndefinedError):
        return
    # An undefined value renders as nothing, which is as safe as an error.
    assert "class" not in text
    assert "module" not in text


def test_chat_template_loops_are_bounded() -> None:
    template = ChatTemplate(byte_tokenizer(), "{% for i in range(10 ** 12) %}x{% endfor %}")
    with pytest.raises(OverflowError, match="Range too big"):
        template.render([{"role": "user", "content": "a"}])


@pytest.mark.daily("qwen3_xml", "mistral", "hermes")
@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.timeout(120)
def test_every_tool_format_parses_hostile_text_completely(name: str) -> None:
    """Repeated openings, quotes and brackets, which blocked the parsers of other engines."""
    pieces = [
        "[f(a=",
        "{{" * 9,
        '{"name": "f", "arguments": {"a": "',
        "<tool_call>",
        "<function=f>",
    ]
    pieces += ["[TOOL_CALLS]f[ARGS]", "\\" * 9, "(((((", "\t\n ", "a=1,", "<|python_start|>["]
    for piece in pieces:
        parser = ReplyParser(calls=Calls(TOOL_FORMATS[name], {"f": {"type": "object"}}))
        text = piece * (60_000 // len(piece))
        for at in range(0, len(text), 500):
            parser.feed(text[at : at + 500])
        parser.close()


def hostile_config(folder: Path, **changes: object) -> Path:
    """Write a config.json that references Python code, which would create a file."""
    code = f"open({str(folder / 'ran')!r}, 'w').close()\n"
    for module in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py"):
        (folder / module).write_text(code + "class Evil: pass\n")
    (folder / "config.json").write_text(json.dumps({**tiny_llama(), **changes}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil"}},
        {"_attn_implementation_internal": "modeling_evil.Evil"},
        {"_attn_implementation": "evil/kernels:modeling_evil"},
        {"vision_config": {"auto_map": {"AutoConfig": "configuration_evil.Evil"}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_loading_a_configuration_runs_no_code(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = hostile_config(tmp_path, **changes)
    config = AutoEasyDeLConfig.from_pretrained(folder)
    assert config.model_type == "llama"
    assert not (folder / "ran").exists()


def test_loading_a_tokenizer_runs_no_code_by_default(tmp_path: Path) -> None:
    folder = hostile_config(tmp_path)
    byte_tokenizer().save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(folder)).eos_token == "</s>"
    assert not (folder / "ran").exists()


def test_uploaded_file_names_are_not_used_as_paths(tmp_path: Path) -> None:
    """The name of an uploaded file is only a label; the server selects the path."""
    folder = tmp_path / "files"
    line = json.dumps(
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    )
    with background(ScriptedEngine(), api_key=KEY, batch_directory=folder) as url:
        headers = {"Authorization": f"Bearer {KEY}"}
        for name in ("../../escaped.jsonl", "/absolute.jsonl", "..\\escaped.jsonl", "a\0b.jsonl"):
            answer = httpx.post(
                f"{url}/files",
                headers=headers,
                data={"purpose": "batch"},
                files={"file": (name, line.encode(), "application/jsonl")},
            )
            assert answer.status_code in (200, 400), answer.text
        for name in ("../../escaped", "..%2f..%2fescaped", "%2e%2e%2fescaped", "file-..", "."):
            answer = httpx.get(f"{url}/files/{name}/content", headers=headers)
            assert answer.status_code in (400, 404), (name, answer.text)
    outside = {path for path in tmp_path.rglob("*") if not path.is_relative_to(folder)}
    assert not outside, "a file was written outside the directory"
