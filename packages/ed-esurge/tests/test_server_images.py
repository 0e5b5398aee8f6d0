"""Images in chat requests: decoding, limits, placeholder tokens, errors, and replies of a model."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.core.commands import EncoderInput
from ed_esurge.server.generation import images
from ed_esurge.server.generation.content_parts import ImagePart
from ed_esurge.server.generation.media import IMAGE
from ed_esurge.server.generation.prompts import PromptEncoder
from ed_esurge.server.generation.rendering import ConversationOptions
from ed_esurge.server.generation.requests import ChatMessage
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from PIL import Image

from tests.hostile_images import damaged, unusual

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}<|assistant|>"
)


def tokenizer():
    made = byte_tokenizer(TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return made


class FakeProcessor:
    """One feature per 8 x 8 pixels; the pixel values are the mean color of the image."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.image_token = tokenizer, "<image>"

    def _merge_kwargs(self, **options):
        return {"images_kwargs": options}

    def _process_images(self, images, *, return_tensors):
        colors = [np.asarray(image, np.float32).mean((0, 1)) for image in images]
        counts = [(image.height // 8) * (image.width // 8) for image in images]
        pixels = np.array([color[:, None, None] for color in colors])
        return {"pixel_values": pixels}, [self.image_token * count for count in counts]


class VisionEngine(ScriptedEngine):
    """A scripted engine with a vision tower, which records the images of its requests."""

    input_names = ("input_ids", "pixel_values")

    def __init__(self, processor: bool = True) -> None:
        super().__init__(lambda prompt, choice: "seen", tokenizer=tokenizer())
        self.processor = FakeProcessor(self.tokenizer) if processor else None
        self.prompts: list[list[int]] = []
        self.images: list[EncoderInput] = []

    def generate(self, prompt, params, request_id, **options):
        self.prompts.append(prompt.token_ids)
        self.images = list(options.get("encoder_inputs", ()))
        return super().generate(prompt, params, request_id, **options)


def encoded(color, size=(16, 8), format="PNG", **options) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, format, **options)
    return data.getvalue()


def part(data: bytes | str) -> dict:
    url = data if isinstance(data, str) else f"data:;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def conversation(*parts) -> list[dict]:
    return [{"role": "user", "content": [*parts]}]


RED, BLUE = encoded("red"), encoded("blue", (24, 8), "JPEG", quality=95)


@pytest.fixture(scope="module")
def engine():
    return VisionEngine()


@pytest.fixture(scope="module")
def url(engine):
    with background(engine, allowed_media_domains=["127.0.0.1"]) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_two_images_become_pixel_values_and_placeholder_tokens(client, engine):
    text = {"type": "text", "text": "<image> and "}
    messages = conversation(part(RED), text, part(BLUE))
    answer = client.chat.completions.create(model="scripted", messages=messages)
    assert answer.choices[0].message.content == "seen"
    token = engine.tokenizer.convert_tokens_to_ids("<image>")
    prompt = engine.prompts[-1]
    assert answer.usage.prompt_tokens == len(prompt)
    spans = [(image.start, image.length) for image in engine.images]
    assert [length for _, length in spans] == [2, 3]
    for start, length in spans:
        assert prompt[start : start + length] == [token] * length
    assert prompt.count(token) == 5, "the text of the user contains no image token"
    first, second = (image.arrays["pixel_values"][:, 0, 0] for image in engine.images)
    np.testing.assert_allclose(first, [255, 0, 0])
    np.testing.assert_allclose(second, [0, 0, 255], atol=8)


def test_images_of_responses_and_messages_have_the_prompt_of_chat(client, engine, url):
    text, end = {"type": "text", "text": "see"}, {"type": "text", "text": "?"}
    client.chat.completions.create(
        model="scripted", messages=conversation(text, part(RED), part(BLUE), end)
    )

    def sent() -> Any:
        return engine.prompts[-1], [(image.key, image.start) for image in engine.images]

    prompt, seen = sent()
    assert len(seen) == 2
    items: list[Any] = [
        {"type": "input_text", "text": "see"},
        *({"type": "input_image", "image_url": part(x)["image_url"]["url"]} for x in (RED, BLUE)),
        {"type": "input_text", "text": "?"},
    ]
    answer = client.responses.create(
        model="scripted", input=[{"role": "user", "content": items}], store=True
    )
    assert answer.output_text == "seen"
    assert sent() == (prompt, seen)
    follow = {"model": "scripted", "input": "and?", "previous_response_id": answer.id}
    client.responses.create(**follow)
    assert sent()[0][: len(prompt)] == prompt
    assert sent()[1] == seen, "the images remain in the conversation"
    (stored,) = client.responses.input_items.list(answer.id).data
    assert [each.type for each in stored.content] == [each["type"] for each in items]
    sources = [
        {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
        for kind, data in (("image/png", RED), ("image/jpeg", BLUE))
    ]
    blocks: Any = [text, *({"type": "image", "source": source} for source in sources), end]
    anthropic_client = anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key="none", max_retries=0
    )
    anthropic_client.messages.create(
        model="scripted", max_tokens=9, messages=[{"role": "user", "content": blocks}]
    )
    assert sent() == (prompt, seen)


def test_rendered_text_keeps_optional_images_of_models_that_read_images():
    message = ChatMessage.model_validate({"role": "user", "content": [part(encoded("red"))]})
    message.content[0].at("f", "c", optional=True)
    request = SimpleNamespace(messages=[message], chat_template=None)
    for accepts_images in (True, False):
        asked: list[Any] = []

        def render(_: Any, messages: Any, options: Any, asked: list[Any] = asked) -> Any:
            asked.extend(messages)
            raise LookupError

        encoder = object.__new__(PromptEncoder)
        encoder.media = SimpleNamespace(accepts_images=accepts_images)
        encoder.renderer = SimpleNamespace(render=render, choose_template=lambda options: None)
        encoder._get_options = lambda request: ConversationOptions()
        encoder._threads = None
        with pytest.raises(LookupError):
            asyncio.run(encoder.get_text(request))
        assert isinstance(asked[0].content[0], ImagePart) == accepts_images


@pytest.mark.parametrize(
    ("path", "message", "param"),
    [
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "url", "url": "a"}}]}], "max_tokens": 2},
            "messages[0].content[0].source",
        ),
    ],
)  # fmt: skip
def test_invalid_images_of_other_apis_name_the_field_of_the_client(url, path, message, param):
    system = {"responses": "instructions", "messages": "system"}[path]
    answer = httpx.post(f"{url}/{path}", json={"model": "scripted", system: "b", **message})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{param}: an image must be a data: URL")


def test_streamed_answer_and_tokenize_have_the_same_image_prompt(client, engine, url):
    messages = conversation({"type": "text", "text": "a"}, part(RED))
    stream = client.chat.completions.create(model="scripted", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "seen"
    root = url.removesuffix("/v1")
    answer = httpx.post(f"{root}/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == engine.prompts[-1]


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        (part("data:image/png,abc"), "base64"),
        (part("data:image/png;base64,a"), "valid base64"),
        (part("data:image/png;base64,AAAA"), "cannot be decoded"),
        (part(BLUE[:300]), "cannot be decoded"),
        (part("file:///etc/passwd"), "data: URL"),
        (part("http://[x"), "data: URL"),
        (part("https://example.com/a.png"), "does not download"),
        ({"type": "image_url"}, "is missing"),
    ],
)
def test_invalid_images_return_400_with_the_part(client, bad, fragment):
    with pytest.raises(openai.BadRequestError, match=fragment) as info:
        client.chat.completions.create(
            model="scripted", messages=conversation(part(RED), {"type": "text", "text": "a"}, bad)
        )
    assert info.value.param.startswith("messages[0].content[2].image_url")


def test_limits_of_bytes_pixels_and_numbers_are_checked_before_decoding(client, monkeypatch):
    def refused(*parts):
        with pytest.raises(openai.BadRequestError) as info:
            client.chat.completions.create(model="scripted", messages=conversation(*parts))
        assert info.value.code == "invalid_image"
        return info.value.message

    # A file of a few kilobytes that decodes to 400 megapixels.
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    assert "pixels" in refused(part(bomb.getvalue()))
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 100)
    assert "16 x 8 pixels, and the limit is 100" in refused(part(RED))
    monkeypatch.setattr(images, "MAX_IMAGES", 1)
    assert "2 images, and the limit is 1" in refused(part(RED), part(RED))
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 10)
    assert "larger than 10 bytes" in refused(part(RED))


class Files(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/moved.png":
            self.send_response(302)
            self.send_header("Location", "/red.png")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(RED)

    def log_message(self, *_):
        pass


def test_images_are_downloaded_from_allowed_hosts_only(client, engine):
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        client.chat.completions.create(
            model="scripted", messages=conversation(part(f"{root}/red.png"))
        )
        assert engine.images[0].length == 2
        for address, fragment in (
            (f"{root}/moved.png", "status 302"),
            (f"http://localhost:{server.server_port}/red.png", "does not download"),
        ):
            with pytest.raises(openai.BadRequestError, match=fragment):
                client.chat.completions.create(
                    model="scripted", messages=conversation(part(address))
                )
        server.shutdown()


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "::1", "::", "fe80::1", "fd00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ],
)
def test_names_of_private_addresses_are_not_downloaded(engine, monkeypatch, address):
    """The name is in the allow-list, and its address is not."""
    looked_up = []

    async def numbers_of(host, port):
        looked_up.append((host, port))
        return ["8.8.8.8", address]

    monkeypatch.setattr(images, "resolve_host", numbers_of)
    reader = images.ChatImages(engine.input_names, engine.processor, ["cdn.test"])
    with pytest.raises(APIError, match="an address that is not public"):
        asyncio.run(reader._read_url("http://cdn.test/a.png", IMAGE, "image"))
    assert looked_up == [("cdn.test", 80)]


def test_public_address_is_connected_with_the_name_of_the_host(engine, monkeypatch):
    """A later answer of the name server cannot change the address."""
    asked = []

    async def numbers_of(host, port):
        return ["93.184.216.34"]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, request.headers["host"], request.extensions))
        return httpx.Response(200, stream=httpx.ByteStream(RED))

    client = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(images.httpx, "AsyncClient", client)
    monkeypatch.setattr(images, "resolve_host", numbers_of)
    reader = images.ChatImages(engine.input_names, engine.processor, ["cdn.test"])
    data = asyncio.run(reader._read_url("https://cdn.test:8443/a.png", IMAGE, "image"))
    assert data == RED
    ((host, name, extensions),) = asked
    assert (host, name, extensions["sni_hostname"]) == (
        "93.184.216.34",
        "cdn.test:8443",
        "cdn.test",
    )


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_images_return_400_and_unusual_images_are_read(client, url, engine):
    address = f"{url}/chat/completions"
    with httpx.Client(timeout=60) as http:

        def status(data: bytes) -> tuple[int, str | None]:
            body = {"model": "scripted", "messages": conversation(part(data))}
            answer = http.post(address, json=body)
            return answer.status_code, answer.json().get("error", {}).get("code")

        refused = {name: status(data) for name, data in damaged().items()}
        assert {*refused.values()} == {(400, "invalid_image")}, refused
        read = {name: status(data) for name, data in unusual().items()}
        small = read.pop("one pixel")  # the processor of this test returns no feature of a pixel
        assert small == (400, "invalid_image")
        assert {*read.values()} == {(200, None)}, read


@pytest.mark.parametrize(
    ("engine", "fragment"),
    [(ScriptedEngine(), "does not accept images"), (VisionEngine(False), "has no processor")],
)
def test_models_without_image_support_return_400(engine, fragment):
    with background(engine) as url, pytest.raises(openai.BadRequestError, match=fragment) as info:
        openai.OpenAI(base_url=url, api_key="none", max_retries=0).chat.completions.create(
            model="scripted", messages=conversation(part(RED))
        )
    assert info.value.param == "messages[0].content[0].image_url"


def test_template_without_images_returns_400():
    engine = VisionEngine()
    with background(engine, chat_template="{{ messages[0].content | length }}") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match=r"template .* does not support images"):
            client.chat.completions.create(model="scripted", messages=conversation(part(RED)))


def test_conversation_with_images_is_never_truncated(engine, client):
    wide = encoded("red", (8 * 300, 8))
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(model="scripted", messages=conversation(part(wide)))
    assert info.value.code == "context_length_exceeded"


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    """Directory of a tiny random LLaVA with its processor."""
    from ed_models.families.llava import LlavaConfig, LlavaForConditionalGeneration
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokens = tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    random = {"num_hidden_layers": 2, "initializer_range": 0.3}
    config = LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": len(tokens), **sizes, **random},
        vision_config={"image_size": 28, "patch_size": 14, **sizes, **random},
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    path = tmp_path_factory.mktemp("llava")
    LlavaForConditionalGeneration.create(config, seed=5).save_pretrained(path)
    square = {"height": 28, "width": 28}
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square),
        tokens,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llava_engine(llava):
    """The engine that `python -m ed_esurge serve` creates from the directory."""
    flags = "--max-model-len 64 --max-num-seqs 2 --max-num-seq-buckets 2 --page-size 16"
    flags += " --max-num-batched-tokens 16 --no-compile-runner --silent-mode"
    flags += " --auto-truncate-prompt"
    return create_engine(parse_model_arguments([str(llava), *flags.split()]))


@pytest.mark.nightly
def test_reply_to_two_images_equals_generate_of_the_model(llava, llava_engine):
    from ed_models.auto import AutoEasyDeLModelForImageTextToText
    from transformers import LlavaProcessor

    model = AutoEasyDeLModelForImageTextToText.from_pretrained(llava)
    processor = LlavaProcessor.from_pretrained(llava)
    text = {"type": "text", "text": "and"}
    with background(llava_engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

        def reply(first: bytes, second: bytes) -> tuple[list[int], list[int], str]:
            answer = client.chat.completions.create(
                model=llava_engine.model_name,
                messages=conversation(part(first), text, part(second)),
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            choice = answer.choices[0]
            return answer.prompt_token_ids, choice.token_ids, choice.message.content

        def expected(first: bytes, second: bytes) -> tuple[list[int], list[int], str]:
            image = {"type": "image"}
            inputs = processor(
                text=processor.apply_chat_template(conversation(image, text, image)),
                images=[Image.open(io.BytesIO(data)) for data in (first, second)],
                add_special_tokens=False,
                return_tensors="np",
            )
            ids, pixels = inputs["input_ids"], inputs["pixel_values"]
            out = model.generate(ids, pixel_values=pixels[None], max_new_tokens=12, eos_token_id=[])
            tokens = out.sequences[0, ids.shape[1] :].tolist()
            decoded = processor.tokenizer.decode(tokens, skip_special_tokens=True)
            return ids[0].tolist(), tokens, decoded

        replies = [reply(RED, BLUE), reply(BLUE, RED), reply(RED, RED)]
        assert replies == [expected(RED, BLUE), expected(BLUE, RED), expected(RED, RED)]
        assert len({tuple(tokens) for _, tokens, _ in replies}) == 3, "the images have no effect"


@pytest.mark.daily("80-None-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "last"), [(80, None), (30, 20)])
def test_truncation_that_would_move_an_image_returns_400(llava_engine, stream, length, last):
    assert llava_engine.config.auto_truncate_prompt
    text = {"type": "text", "text": "a" * length}
    with background(llava_engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="are not truncated") as info:
            client.chat.completions.create(
                model=llava_engine.model_name,
                messages=conversation(part(RED), text),
                stream=stream,
                extra_body={"truncate_prompt_tokens": last},
            )
    assert (info.value.code, info.value.param) == ("context_length_exceeded", "messages")
