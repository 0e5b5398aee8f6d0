"""A damaged folder in the directory of models affects no other model, and errors show no paths."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import httpx
import numpy as np
import pytest
from ed_esurge.frontends.library import checkpoint_files
from ed_esurge.frontends.library.checkpoint_files import CheckpointFiles
from ed_esurge.frontends.library.loading import ModelLoading
from ed_esurge.server.http.errors import hide_paths
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra.errors import CheckpointError
from safetensors.numpy import save_file

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_header(path, header, size=8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * size)


def with_header(header):
    return lambda folder: write_header(folder / "model.safetensors", header)


def with_config(**changes):
    text = json.dumps({**CONFIG, **changes})
    return lambda folder: (folder / "config.json").write_text(text)


def replace_weights(folder, create):
    (folder / "model.safetensors").unlink()
    create(folder / "model.safetensors")


#: Kind of damage -> function that damages a folder with a model.
DAMAGE = {
    "empty weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "short weights": lambda folder: (folder / "model.safetensors").write_bytes(b"abc"),
    "random weights": lambda folder: (folder / "model.safetensors").write_bytes(b"\x9f" * 999),
    "long header": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff\xff\0\0" * 9),
    "header of another type": with_header([1]),
    "number as header": with_header(5),
    "no JSON": with_header(b"{"),
    "no Unicode": with_header(b'{"\xff": 1}'),
    "deep header": with_header(b"[" * 50_000 + b"]" * 50_000),
    "tensor without shape": with_header({"w": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "tensor of another type": with_header({"w": [1]}),
    "shape of texts": with_header({"w": {**TENSOR, "shape": ["a"]}}),
    "negative shape": with_header({"w": {**TENSOR, "shape": [-2]}}),
    "huge shape": with_header({"w": {**TENSOR, "shape": [2**47] * 16}}),
    "huge number": with_header({"w": {**TENSOR, "shape": [10**400]}}),
    "offsets outside": with_header({"w": {**TENSOR, "data_offsets": [0, 2**60]}}),
    "offsets reversed": with_header({"w": {**TENSOR, "data_offsets": [8, 0]}}),
    "three offsets": with_header({"w": {**TENSOR, "data_offsets": [0, 4, 8]}}),
    "pipe": lambda folder: replace_weights(folder, os.mkfifo),
    "dangling link": lambda folder: replace_weights(folder, lambda path: path.symlink_to("none")),
    "loop of links": lambda folder: replace_weights(
        folder, lambda path: path.symlink_to(path.name)
    ),
    "folder as weights": lambda folder: replace_weights(folder, lambda path: path.mkdir()),
    "damaged config": lambda folder: (folder / "config.json").write_bytes(b"\xff{"),
    "list as config": lambda folder: (folder / "config.json").write_text("[1]"),
    "deep config": lambda folder: (folder / "config.json").write_text("[" * 50_000),
    "fields of other types": with_config(
        max_position_embeddings="x", text_config=5, architectures=5, model_type={"a": []}
    ),
    "numbers without bounds": with_config(
        max_position_embeddings=10**400, num_attention_heads=0, hidden_size=-(10**400)
    ),
    "template": lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe"),
    "certificate": lambda folder: (folder / "certificate.json").write_bytes(b"\xff"),
    "tokenizer": lambda folder: (folder / "tokenizer_config.json").write_text("[" * 50_000),
}


def create_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": np.zeros((3, 4), np.float32)}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A server with two healthy models, and one damaged model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    create_model(folder / "healthy")
    create_model(folder / "org" / "inner")
    for kind, damage in DAMAGE.items():
        create_model(folder / kind.replace(" ", "-"))
        damage(folder / kind.replace(" ", "-"))
    os.mkdir(os.fsencode(folder) + b"/name-\xff")
    (folder / "line\nbreak").mkdir()
    (folder / "loop").symlink_to("loop")

    def load(path):
        if not path.name.startswith(("healthy", "inner")):
            raise CheckpointError(f"{path}/model.safetensors is damaged: copy it again")
        engine = ScriptedEngine(lambda prompt, choice: "x", max_model_len=2048)
        engine.tokenizer = byte_tokenizer()
        return engine

    loading = ModelLoading(folder, load, lambda files: files.page_bytes(64, 2))
    with background({}, model_directory=loading) as url:
        yield url.removesuffix("/v1"), str(folder)


def test_lists_contain_the_healthy_models(root):
    url, folder = root
    for path, models, name in (
        ("/v1/models", "data", "id"),
        ("/models", "data", "id"),
        ("/api/tags", "models", "name"),
    ):
        answer = httpx.get(url + path, timeout=30)
        assert answer.status_code == 200, (path, answer.text)
        assert {one[name] for one in answer.json()[models]} >= {"healthy", "org/inner"}
        assert folder not in answer.text
    body = {"model": "healthy", "prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_model_returns_an_error_without_paths(root, kind):
    url, folder = root
    name = kind.replace(" ", "-")
    requests = {
        "/v1/completions": {"model": name, "prompt": "a", "max_tokens": 1},
        "/api/show": {"model": name},
        "/api/generate": {"model": name, "prompt": "a"},
        "/v1/messages": {
            "model": name,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "a"}],
        },
    }
    for path, body in requests.items():
        answer = httpx.post(url + path, json=body, timeout=30)
        assert folder not in answer.text
        assert "/tmp" not in answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]
            assert "see the traceback" not in answer.text, (path, kind)


def test_lists_read_unchanged_folders_once(root, monkeypatch):
    url, folder = root
    folder = Path(folder)
    reads = []
    for name in ("_json", "_header"):
        read = getattr(checkpoint_files, name)

        def counted(path, read=read):
            reads.append(path.parent.name)
            return read(path)

        monkeypatch.setattr(checkpoint_files, name, counted)
    paths = ("/api/tags", "/v1/models", "/v1/models/healthy")
    before = [httpx.get(url + path, timeout=30).json() for path in paths]
    reads.clear()
    assert [httpx.get(url + path, timeout=30).json() for path in paths] == before
    assert not reads
    create_model(folder / "added")
    save_file({"w": np.zeros((3, 5), np.float32)}, folder / "healthy" / "model.safetensors")
    tags, models, _ = [httpx.get(url + path, timeout=30).json() for path in paths]
    assert {*reads} == {"added", "healthy"}
    assert "added" in {one["id"] for one in models["data"]}
    digests = [{one["name"]: one["digest"] for one in each["models"]} for each in (before[0], tags)]
    assert digests[0].pop("healthy") != digests[1].pop("healthy")
    assert digests[1].pop("added") and digests[0] == digests[1]
    shutil.rmtree(folder / "added")
    names = [[one["id"] for one in each["data"]] for each in (before[1], models)]
    assert [name for name in names[1] if name != "added"] == names[0]
    assert "added" not in httpx.get(f"{url}/v1/models", timeout=30).text


def test_cache_of_checkpoints_has_a_limit(tmp_path):
    cache = checkpoint_files.CheckpointCache(2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        create_model(path)
    first, second, third = map(cache.get, paths)
    assert cache.get(paths[2]) is third and cache.get(paths[1]) is second
    assert cache.get(paths[0]) is not first
    shutil.rmtree(paths[0])
    assert cache.get(paths[0]) is None
    assert len(cache._entries) == 1


def test_unreadable_folders_are_omitted(tmp_path, monkeypatch):
    create_model(tmp_path / "a")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert not CheckpointFiles.is_checkpoint(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/srv/models/a/model.safetensors is damaged", "model.safetensors is damaged"),
        ("cannot open '/home/ann/key.pem': missing", "cannot open 'key.pem': missing"),
        ('[Errno 2] No such file: "/a/b/"', '[Errno 2] No such file: "b"'),
        ("send POST /wake_up first", "send POST /wake_up first"),
        ("see https://example.org/a/b for more", "see https://example.org/a/b for more"),
        ("a share of 1/2/3", "a share of 1/2/3"),
        ("/data/base/org/x is no model", "org/x is no model"),
    ],
)
def test_errors_have_names_instead_of_absolute_paths(text, expected):
    assert hide_paths(text, "/data/base") == expected
