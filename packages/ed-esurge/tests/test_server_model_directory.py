"""Models of a directory are loaded on demand, unloaded, and stay within the memory limit."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import numpy as np
import ollama
import openai
import pytest
from ed_esurge.frontends.library.checkpoint_files import CheckpointFiles, size_name
from ed_esurge.frontends.library.definitions import DefinitionStore, ModelDefinition
from ed_esurge.frontends.library.directory import ModelDirectory
from ed_esurge.frontends.library.loading import ModelLoading
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra.errors import ConfigError
from safetensors.numpy import save_file

SIZES = {"a": 40, "b": 40, "c": 70, "org/d": 10}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path):
    for name in SIZES:
        path = tmp_path / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(CONFIG))
        save_file({"w": np.zeros((3, 4), np.float32)}, path / "model.safetensors")
    (tmp_path / "notes").mkdir()
    return tmp_path


class Recorded:
    """A directory of models without weights, which records its loads and unloads."""

    def __init__(self, folder, memory=None, keep_alive=300.0, delay=0.0, factor=1):
        self.events, self.most, self.delay = [], 0, delay
        self.directory = ModelDirectory(
            folder,
            load=self.load,
            unload=self.unload,
            estimate=lambda files: factor * SIZES[files.path.relative_to(folder).as_posix()],
            memory=memory,
            keep_alive=keep_alive,
        )

    async def load(self, name, files):
        await asyncio.sleep(self.delay)
        self.events.append(f"+{name}")
        model = SimpleNamespace(name=name, activity=self.directory.activity())
        return model, SIZES[name]

    async def unload(self, model):
        self.events.append(f"-{model.name}")

    async def use(self, name, seconds=0.0):
        async with self.directory.lease(name) as (model, waited):
            assert model.name == name
            await asyncio.sleep(seconds)
            return waited


def test_directory_finds_models_of_two_levels(folder):
    directory = Recorded(folder).directory
    assert directory.names() == ["a", "b", "c", "org/d"]
    for name in (
        "notes",
        "../x",
        "a/../b",
        "/etc",
        "a/b/c",
        "",
        "a\0",
        "x" * 300,
        "é" * 200,
        "\ud800",
    ):
        assert directory.files(name) is None


def test_listed_models_are_served_also_through_links(folder, tmp_path_factory):
    """The operator can link the folder of a model, or of several models, to another place."""
    other = tmp_path_factory.mktemp("elsewhere")
    (folder / "a").rename(other / "a")
    (folder / "a").symlink_to(other / "a")
    (folder / "org").rename(other / "org")
    (folder / "org").symlink_to(other / "org")
    (folder / ".hidden").symlink_to(other / "a")
    (folder / ".definitions").mkdir()
    (folder / ".definitions" / "x").symlink_to(other / "a")
    directory = Recorded(folder).directory
    assert directory.names() == ["a", "b", "c", "org/d"]
    assert all(directory.files(name) is not None for name in directory.names())
    assert directory.files(".hidden") is directory.files(".definitions/x") is None


@pytest.mark.parametrize("factor", [0, 1])
def test_least_recently_used_model_is_unloaded_within_the_memory_limit(folder, factor):
    async def run():
        recorded = Recorded(folder, memory=100, factor=factor)  # 0: every estimate is too low
        for name in ("a", "b", "a", "c", "org/d", "a"):
            await recorded.use(name)
            assert recorded.directory.used <= 100
        return recorded.events

    events = asyncio.run(run())
    assert events[:2] == ["+a", "+b"]
    assert events.index("-b") < events.index("-a")  # b was used before a
    assert events.count("+a") == 2


def test_requests_wait_for_models_in_use_and_share_one_load(folder):
    async def run():
        recorded = Recorded(folder, memory=80, delay=0.01)
        slow = asyncio.create_task(recorded.use("a", 0.2))
        await asyncio.sleep(0.05)
        waited = await asyncio.gather(*(recorded.use("c", 0.01) for _ in range(4)))
        assert min(waited) > 0.1  # the models have no room before the end of the slow request
        await slow
        assert await recorded.use("c") == 0.0
        assert recorded.events == ["+a", "-a", "+c"]
        cancelled = asyncio.create_task(recorded.use("b"))
        await asyncio.sleep(0.002)
        cancelled.cancel()
        await asyncio.sleep(0.05)
        assert recorded.directory.used <= 80  # the load has finished

    asyncio.run(run())


def test_models_that_compete_for_memory_all_make_progress(folder):
    async def run():
        recorded = Recorded(folder, memory=70, delay=0.001)
        names = ["a", "c", "b", "org/d"] * 8
        await asyncio.gather(*(recorded.use(name, 0.002) for name in names))
        assert recorded.directory.used <= 70

    asyncio.run(asyncio.wait_for(run(), 20))


def test_idle_models_are_unloaded_after_keep_alive(folder):
    async def run():
        recorded = Recorded(folder, keep_alive=0.05)
        sweeping = asyncio.create_task(recorded.directory.sweep())
        await recorded.use("a", 0.1)  # running requests keep the model
        assert recorded.events == ["+a"]
        await asyncio.sleep(0.1)
        assert recorded.events == ["+a", "-a"]
        async with recorded.directory.lease("b") as (model, _):
            model.activity.keep(0)
        async with recorded.directory.lease("c") as (model, _):
            model.activity.keep(float("inf"))
        await asyncio.sleep(0.15)
        assert [*recorded.directory.loaded] == ["c"]
        sweeping.cancel()

    asyncio.run(run())


def test_model_above_the_memory_limit_is_an_error(folder):
    async def run():
        recorded = Recorded(folder, memory=50)
        with pytest.raises(ConfigError, match="model-memory"):
            await recorded.use("c")
        assert recorded.directory.used == 0

    asyncio.run(run())


def test_files_have_parameters_digest_and_pages(folder):
    files = CheckpointFiles(folder / "a")
    assert (files.parameters, files.dtype, files.family) == (12, "F32", "llama")
    assert files.size == (folder / "a" / "model.safetensors").stat().st_size
    assert files.page_bytes(10, 4) == 2 * 2 * 8 * 10 * 4  # keys and values of two layers
    assert files.digest == CheckpointFiles(folder / "b").digest
    save_file({"w": np.zeros((3, 5), np.float32)}, folder / "b" / "model.safetensors")
    assert files.digest != CheckpointFiles(folder / "b").digest
    assert [size_name(count) for count in (12, 1500, 7_241_732_096)] == ["12", "1.5K", "7.24B"]


def test_derived_models_inherit_and_circles_are_errors(tmp_path):
    store = DefinitionStore(tmp_path / "x")
    store.add("one", ModelDefinition(source="a", system="S", parameters={"top_k": 1, "seed": 2}))
    store.add("two:7b", ModelDefinition(source="one", parameters={"top_k": 5}))
    again = DefinitionStore(tmp_path / "x")
    found = again.resolve("two:7b", lambda name: name == "a")
    assert (found.source, found.system, found.parameters) == ("a", "S", {"top_k": 5, "seed": 2})
    again.add("one", ModelDefinition(source="two:7b"))
    with pytest.raises(ConfigError, match="circle"):
        again.resolve("one", lambda name: False)
    again.remove("one")
    with pytest.raises(ConfigError, match="does not exist"):
        again.resolve("two:7b", lambda name: False)


@pytest.fixture
def served(folder):
    """A server whose models of the directory answer with their names."""
    loads = []

    def load(path):
        loads.append((path.name, threading.current_thread() is threading.main_thread()))
        engine = ScriptedEngine(lambda prompt, choice: f"I am {path.name}", max_model_len=2048)
        engine.prompts = []
        engine.tokenizer = byte_tokenizer()
        return engine

    loading = ModelLoading(folder, load, lambda files: 0, max_model_len=48)
    with background({}, model_directory=loading) as url:
        yield url, loads


def test_server_loads_models_of_a_directory_for_every_api(served):
    url, loads = served
    client = ollama.Client(host=url.removesuffix("/v1"))
    assert [one.model for one in client.list().models] == ["a", "b", "c", "org/d"]
    assert client.ps().models == []
    assert client.show("a").modelinfo["general.parameter_count"] == 12
    assert loads == []
    first = client.chat("a", [{"role": "user", "content": "Who?"}])
    assert first.message.content == "I am a"
    assert first.load_duration > 0
    assert first.total_duration >= first.load_duration
    assert client.chat("a", [{"role": "user", "content": "Who?"}]).load_duration == 0
    other = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    answer = other.completions.create(model="org/d", prompt="Who?", stream=True)
    assert "".join(part.choices[0].text for part in answer) == "I am d"
    lengths = {one.id: one.model_extra["max_model_len"] for one in other.models.list()}
    # Without loading: the length of the files, 64, and the limit of the server, 48.
    assert lengths == {"a": 2048, "b": 48, "c": 48, "org/d": 2048}
    assert {one.model for one in client.ps().models} == {"a", "org/d"}
    assert loads == [("a", False), ("d", False)]
    assert client.generate("a", keep_alive=0).done_reason == "unload"
    for _ in range(100):
        if {one.model for one in client.ps().models} == {"org/d"}:
            break
    with pytest.raises(openai.NotFoundError, match="org/d"):
        other.completions.create(model="org/e", prompt="Who?")
    with pytest.raises(openai.BadRequestError, match="on demand"):
        other.post("/completions", body={"prompt": "a"}, cast_to=object)


@pytest.mark.nightly
def test_created_models_have_system_prompt_and_parameters(served):
    url, _ = served
    client = ollama.Client(host=url.removesuffix("/v1"))
    status = client.create(
        "mario", from_="a", system="You are Mario.", parameters={"num_predict": 3, "stop": ["z"]}
    )
    assert status.status == "success"
    parts = [one.status for one in client.create("luigi", from_="mario", system="L", stream=True)]
    assert parts[-1] == "success"
    asked = [{"role": "user", "content": "Who?"}]
    assert client.chat("mario", asked).message.content == "I a"
    assert client.chat("luigi:latest", asked).prompt_eval_count < 60
    assert client.chat("mario", asked, options={"num_predict": -1}).message.content == "I am a"
    other = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    answer = other.chat.completions.create(model="mario", messages=asked)
    assert (answer.model, answer.choices[0].message.content) == ("mario", "I a")
    longer = other.chat.completions.create(model="mario", messages=asked, max_tokens=5)
    assert longer.choices[0].message.content == "I am "
    assert longer.usage.prompt_tokens > answer.usage.prompt_tokens - 1
    shown = client.show("mario")
    assert shown.parameters == 'num_predict 3\nstop "z"'
    assert "SYSTEM" in shown.modelfile
    client.copy("mario", "bowser")
    assert client.chat("bowser", asked).message.content == "I a"
    client.delete("mario")
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat("luigi", asked)
    with pytest.raises(ollama.ResponseError, match="weights"):
        client.delete("a")
    with pytest.raises(ollama.ResponseError, match="weights"):
        client.create("a", from_="bowser")
    with pytest.raises(ollama.ResponseError, match="uploads"):
        client.create("x", files={"a": "b"})


@pytest.mark.nightly
def test_real_models_are_swapped_within_the_memory_limit(tmp_path, make_llama):
    """Two models with different weights, of which one fits into the memory."""
    import jax
    from ed_esurge.command import serve
    from ed_esurge.command.model_directory import estimate, model_directory
    from ed_esurge.command.program import parse_words

    answers = {}
    for seed, name in enumerate(("one", "two"), 1):
        make_llama(seed=seed).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    flags = ["--model-dir", str(tmp_path), "--max-model-len", "64", "--max-num-seqs", "2"]
    flags += ["--page-size", "16", "--no-compile-runner", "--silent-mode", "--dtype", "float32"]
    values = parse_words(serve.serve, flags)
    arguments = values["loading"].replace(engine=values["engine"])
    needed = estimate(arguments, CheckpointFiles(tmp_path / "one"))
    options = values["server"].replace(model_memory=1.5 * needed / 2**30)
    loading = model_directory(arguments, options)
    before = sum(array.nbytes for array in jax.live_arrays())
    with background({}, model_directory=loading) as url:
        client = ollama.Client(host=url.removesuffix("/v1"))
        for name in ("one", "two", "one", "two"):
            options = {"temperature": 0, "num_predict": 8}
            answer = client.generate(name, "A text", raw=True, options=options)
            assert answers.setdefault(name, answer.response) == answer.response
            assert answer.load_duration > 0
            (running,) = client.ps().models
            assert running.model == name
            assert 0.5 * needed < running.size < 1.5 * needed
            live = sum(array.nbytes for array in jax.live_arrays()) - before
            assert live < 1.5 * needed
    assert len(set(answers.values())) == 2
