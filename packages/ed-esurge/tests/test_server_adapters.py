"""LoRA adapters over HTTP: loading, listing, selection by name, and forbidden paths."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.frontends.library.loading import ModelLoading
from ed_esurge.server.app import create_app
from ed_esurge.server.generation import answers
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import ApiKey
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    """The adapters `one` and `two` in `open`, another adapter outside, and links to it."""
    for place in ("open/one", "open/two", "shut"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "adapter_config.json").write_text("{}")
    (tmp_path / "open/empty").mkdir()
    (tmp_path / "open/link").symlink_to(tmp_path / "shut")
    (tmp_path / "open/mixed").mkdir()
    (tmp_path / "open/mixed/adapter_config.json").symlink_to(tmp_path / "shut/adapter_config.json")
    return tmp_path / "open"


@pytest.fixture
def engine():
    return ScriptedEngine(config=EngineConfig(max_loras=2))


@pytest.fixture
def http(engine, folder):
    with (
        background(engine, lora_directory=folder) as url,
        httpx.Client(base_url=url) as client,
    ):
        yield client


def load(http, name="mine", path="one", **more):
    return http.post("load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def refused(answer, status):
    assert answer.status_code == status, answer.text
    return answers.Error.model_validate(answer.json()).error


def test_loaded_adapter_is_listed_as_model(http, engine, folder):
    assert load(http).text == "Success: LoRA adapter 'mine' added successfully."
    assert load(http, "other", str(folder / "two")).status_code == 200
    cards = http.get("models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("scripted", None),
        ("mine", "scripted"),
        ("other", "scripted"),
    ]
    assert http.get("models/mine").json() == cards[1]
    for path, body in [
        ("completions", {"prompt": "a"}),
        ("completions", {"prompt": ["a", "b"], "stream": True}),
        ("chat/completions", {"messages": CHAT}),
        ("responses", {"input": "a"}),
        ("messages", {"messages": CHAT, "max_tokens": 4}),
        ("embeddings", {"input": "a"}),
        ("score", {"text_1": "a", "text_2": "b"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
    ]:
        before = len(engine.options)
        answer = http.post(path, json={**body, "model": "mine"})
        assert answer.status_code == 200, answer.text
        asked = list(engine.options.values())[before:]
        assert asked and all(options == {"lora_name": "mine"} for options in asked), path
        text = answer.text.partition("\n")[0].removeprefix("data: ")
        assert json.loads(text)["model"] == "mine"
    http.post("completions", json={"prompt": "a", "model": "scripted"})
    assert list(engine.options.values())[-1] == {}
    gone = http.post("unload_lora_adapter", json={"lora_name": "mine"})
    assert gone.text == "Success: LoRA adapter 'mine' removed successfully."
    assert refused(http.post("completions", json={"prompt": "a", "model": "mine"}), 404)
    assert refused(http.post("unload_lora_adapter", json={"lora_name": "mine"}), 404)
    assert refused(http.get("models/mine"), 404)


def test_adapter_names_are_unique_and_their_number_is_limited(http):
    load(http)
    assert "already been loaded" in refused(load(http), 400).message
    assert load(http, path="two", load_inplace=True).status_code == 200
    assert http.get("models/mine").json()["root"].endswith("two")
    assert "name of the model" in refused(load(http, "scripted"), 400).message
    load(http, "second")
    assert "max_loras 2" in refused(load(http, "third"), 400).message
    assert refused(load(http, "a b"), 400).param == "lora_name"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("..", 403),
        (".", 403),
        ("../shut", 403),
        ("one/../../shut", 403),
        ("/etc", 403),
        ("link", 403),
        ("mixed", 403),
        ("a\0b", 403),
        ("x" * 4000, 403),
        ("nowhere", 404),
        ("one/adapter_config.json", 404),
        ("empty", 400),
    ],
)
def test_adapter_paths_outside_the_directory_are_rejected(http, folder, path, status):
    error = refused(load(http, path=path), status)
    assert error.param == "lora_path"
    assert str(folder.parent) not in error.message
    assert len(http.get("models").json()["data"]) == 1


def test_adapter_loading_is_disabled_by_default(folder):
    with (
        background(ScriptedEngine(), lora_directory=folder) as url,
        httpx.Client(base_url=url) as http,
    ):
        assert "max_loras" in refused(load(http), 404).message
    with (
        background(ScriptedEngine(config=EngineConfig(max_loras=1))) as url,
        httpx.Client(base_url=url) as http,
    ):
        assert "lora_directory" in refused(load(http), 403).message


def test_request_selects_one_of_several_models_and_their_adapters(folder):
    first = ScriptedEngine(lambda prompt, choice: "one", config=EngineConfig(max_loras=1))
    second = ScriptedEngine(lambda prompt, choice: "two", config=EngineConfig(max_loras=1))
    engines = {"a": first, "b": second}
    with background(engines, lora_directory=folder) as url, httpx.Client(base_url=url) as http:
        assert [card["id"] for card in http.get("models").json()["data"]] == ["a", "b"]
        for model, text in [("a", "one"), ("b", "two"), (None, "one")]:
            answer = http.post("completions", json={"prompt": "x", "model": model}).json()
            assert (answer["choices"][0]["text"], answer["model"]) == (text, model or "a")
        assert load(http, "mine", model="b").status_code == 200
        assert first.list_lora_adapters() == []
        assert http.post("completions", json={"prompt": "x", "model": "mine"}).status_code == 200
        assert list(second.options.values())[-1] == {"lora_name": "mine"}
        error = refused(http.post("completions", json={"prompt": "x", "model": "c"}), 404)
        assert "a, b, mine" in error.message
        # The server stores responses of all models.
        kept = http.post("responses", json={"input": "x", "model": "b"}).json()
        assert http.get(f"responses/{kept['id']}").json() == kept
        text = http.get("/../metrics").text
        assert 'vllm:generation_tokens_total{model_name="a"} 8.0' in text
        assert 'vllm:num_requests_running{engine="0",model_name="b"} 0.0' in text
        root = url.removesuffix("/v1")
        assert httpx.get(f"{root}/health/decode").status_code == 200
        second.is_healthy = False
        for path in ("/health", "/health/live", "/health/decode"):
            assert httpx.get(root + path).status_code == 503
        assert http.post("completions", json={"prompt": "x", "model": "a"}).status_code == 200
        assert http.post("completions", json={"prompt": "x", "model": "b"}).status_code == 503


class SlowLoads(ScriptedEngine):
    """Loads end in the order of `seconds`, and later loads of a name fail, as in the engine."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(config=EngineConfig(max_loras=4))
        self.seconds, self.begun = list(seconds), asyncio.Event()

    async def load_lora_adapter(self, name, source):
        self.begun.set()
        await asyncio.sleep(self.seconds.pop(0) if self.seconds else 0)
        await super().load_lora_adapter(name, source)


def clients(engines, folder, **options):
    """Return a client for each of three keys. The last is that of an administrator."""
    names = ("ann", "bob", "root")
    keys = [ApiKey.of(name, admin=name == "root") for name in names]
    keys = [key.model_copy(update={"name": name}) for key, name in zip(keys, names, strict=True)]
    transport = httpx.ASGITransport(
        create_app(engines, api_key=keys, lora_directory=folder, **options)
    )
    return [
        httpx.AsyncClient(
            transport=transport,
            base_url="http://localhost/v1/",
            headers={"Authorization": f"Bearer {name}"},
        )
        for name in names
    ]


def place(name, path, owner, **more):
    return {"lora_name": name, "lora_path": path, "owner": owner, **more}


@pytest.mark.parametrize("seconds", [(0.05, 0), (0, 0.05)])
@pytest.mark.parametrize("path", ["two", "empty"])
def test_adapter_belongs_to_the_owner_whose_load_succeeded(folder, seconds, path):
    async def work():
        ann, bob, root = clients(SlowLoads(*seconds), folder)
        bodies = [place("x", "one", "ann"), place("x", path, "bob")]
        loads = [root.post("load_lora_adapter", json=body) for body in bodies]
        statuses = [answer.status_code for answer in await asyncio.gather(*loads)]
        assert sorted(statuses) == [200, 400]
        winner, loser = (ann, bob) if statuses[0] == 200 else (bob, ann)
        assert (await winner.get("models/x")).status_code == 200
        assert (await loser.get("models/x")).status_code == 404
        # A failed load in place of the adapter leaves neither an adapter nor owners.
        body = place("x", "empty", "bob", load_inplace=True)
        assert (await root.post("load_lora_adapter", json=body)).status_code == 400
        body = {"lora_name": "x", "lora_path": "one"}
        assert (await root.post("load_lora_adapter", json=body)).status_code == 200
        assert (await ann.get("models/x")).status_code == 200
        assert (await bob.get("models/x")).status_code == 200

    asyncio.run(work())


def test_load_of_a_client_that_left_keeps_its_owner(folder):
    async def work():
        engine = SlowLoads(0.5)
        ann, bob, root = clients(engine, folder)
        body = place("x", "one", "ann")
        load = asyncio.create_task(root.post("load_lora_adapter", json=body))
        await asyncio.wait_for(engine.begun.wait(), 60)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        while (await root.get("models/x")).status_code != 200:
            await asyncio.sleep(0.01)
        assert (await bob.get("models/x")).status_code == 404
        assert (await ann.get("models/x")).status_code == 200

    asyncio.run(work())


def test_adapter_that_is_loaded_while_the_names_are_listed_is_described(folder, monkeypatch):
    async def work():
        *_, root = clients(SlowLoads(), folder)
        loop, list_cards = asyncio.get_running_loop(), ServedModels.cards

        def list_before_load(server, owner):
            cards = list_cards(server, owner)
            monkeypatch.setattr(ServedModels, "cards", list_cards)
            load = root.post("load_lora_adapter", json=place("x", "one", "ann"))
            assert asyncio.run_coroutine_threadsafe(load, loop).result(60).status_code == 200
            return cards

        monkeypatch.setattr(ServedModels, "cards", list_before_load)
        assert (await root.get("models/x")).json()["id"] == "x"

    asyncio.run(work())


def test_adapters_and_models_have_different_names(folder, tmp_path_factory):
    async def work():
        models = tmp_path_factory.mktemp("models")
        (models / "stored").mkdir()
        (models / "stored/config.json").write_text("{}")
        (models / "stored/model.safetensors").write_bytes(b"")
        loading = ModelLoading(models, lambda path: ScriptedEngine(), lambda files: 0)
        engines = {"a": SlowLoads(), "b": SlowLoads()}
        *_, root = clients(engines, folder, model_directory=loading)
        body = place("x", "one", "ann", model="b")
        assert (await root.post("load_lora_adapter", json=body)).status_code == 200
        derived = {"model": "derived", "from": "a", "stream": False}
        assert (await root.post("http://localhost/api/create", json=derived)).status_code == 200
        for name in ("b", "x", "stored", "derived"):
            answer = await root.post("load_lora_adapter", json=place(name, "one", "ann", model="a"))
            assert refused(answer, 400).param == "lora_name"
        taken = {**derived, "model": "x"}, {"source": "a", "destination": "x"}
        for path, body in zip(("create", "copy"), taken, strict=True):
            answer = await root.post(f"http://localhost/api/{path}", json=body)
            assert answer.status_code == 400

    asyncio.run(work())


@pytest.mark.nightly
def test_adapter_loaded_over_http_equals_adapter_loaded_in_python(make_llama, tokenizer, tmp_path):
    """An adapter loaded over HTTP produces the same answers as one loaded in Python."""
    import jax
    from ed_esurge import SamplingParams, eSurge
    from ed_infra.specs import LoraSpec
    from ed_models.adapters.lora import lora_layers

    base = make_llama()
    model = base.apply_lora(LoraSpec(rank=2, alpha=4.0), name="mine")
    for place, (_, layer) in enumerate(lora_layers(model)):
        key = jax.random.key(place)
        layer.lora_b.set_value(0.3 * jax.random.normal(key, layer.lora_b.shape))
    model.save_pretrained(tmp_path / "mine")
    options = {"max_loras": 1, "max_lora_rank": 2, "max_num_seqs": 2, "max_model_len": 64}
    engine = eSurge(
        make_llama(), tokenizer, page_size=8, compile_runner=False, silent_mode=True, **options
    )
    body = {"prompt": "The cat", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with (
        background(engine, served_model_name="base", lora_directory=tmp_path) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        assert load(http, "mine", "mine").status_code == 200
        texts = {
            name: http.post("completions", json={**body, "model": name}).json()["choices"][0]
            for name in ("base", "mine")
        }
        assert texts["base"]["token_ids"] != texts["mine"]["token_ids"]
        assert http.post("unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    greedy = SamplingParams(temperature=0, max_tokens=8)
    engine.load_lora_adapter("again", tmp_path / "mine")
    (direct,) = engine.generate("The cat", greedy, lora_name="again")
    assert direct.outputs[0].token_ids == texts["mine"]["token_ids"]
