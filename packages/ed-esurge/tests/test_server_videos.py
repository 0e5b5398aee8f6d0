"""Videos in chat requests: tokens, replies, downloads, limits and hostile files."""

from __future__ import annotations

import base64
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from ed_esurge.children.process import JobGroup
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.pictures.clip_decoder import ClipDecoder
from ed_esurge.pictures.decoder import PictureError
from ed_esurge.server.generation import images, videos
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_models.checkpoints.clips import Sampling, read_clip

from tests.image_checkpoints import save_checkpoint, with_tokens
from tests.image_processors import VIDEOS
from tests.video_files import DAMAGED, HOSTILE, get_clip, make_frames, write_gif, write_video

Image = pytest.importorskip("PIL.Image")

#: The template of Qwen3-VL for messages with parts.
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}<|assistant|>"
)
TEXT = {"type": "text", "text": "what?"}
SAMPLING = Sampling(whole=True, fps=2, shortest_edge=64, longest_edge=65536, patch_size=4)


def part(data: bytes | str, kind: str = "video_url") -> dict[str, Any]:
    url = data if isinstance(data, str) else f"data:;base64,{base64.b64encode(data).decode()}"
    return {"type": kind, kind: {"url": url}}


def encode_image() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (24, 16), "red").save(data, "PNG")
    return data.getvalue()


def write_files(folder: Path, *clips: bytes) -> list[str]:
    """Write clips, and return their paths."""
    paths = [folder / f"{place}" for place in range(len(clips))]
    for path, clip in zip(paths, clips, strict=True):
        path.write_bytes(clip)
    return list(map(str, paths))


class VideoEngine(ScriptedEngine):
    """A scripted engine of a model with videos, which records its prompts and their items."""

    input_names = (
        *("input_ids", "pixel_values", "image_grid_thw", "image_times"),
        *("pixel_values_videos", "video_grid_thw"),
    )

    def __init__(self, name: str = "qwen2_5_vl", **options: Any) -> None:
        self.processor = VIDEOS[name](with_tokens)
        tokenizer = self.processor.tokenizer
        tokenizer.chat_template = TEMPLATE
        super().__init__(lambda prompt, choice: "seen", tokenizer=tokenizer, **options)
        self.prompts: list[list[int]] = []
        self.items: list[Any] = []

    def generate(self, prompt, params, request_id, **options):
        self.prompts.append(prompt.token_ids)
        self.items = list(options.get("encoder_inputs", ()))
        return super().generate(prompt, params, request_id, **options)


@pytest.fixture(scope="module")
def engine():
    return VideoEngine(max_model_len=2**15)


@pytest.fixture(scope="module")
def url(engine):
    with background(engine, allowed_media_domains=["127.0.0.1"]) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(client: openai.OpenAI, *parts: Any, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": [*parts]}]
    return client.chat.completions.create(model="scripted", messages=messages, **options)


@pytest.mark.parametrize("name", list(VIDEOS))
def test_tokens_and_patches_are_those_of_the_processor(name, tmp_path):
    engine = VideoEngine(name)
    gif, image = write_gif(make_frames(9, seed=1), 200), encode_image()
    with background(engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        media = part(get_clip()), TEXT, part(image, "image_url"), part(gif)
        answer = ask(client, *media, {"type": "text", "text": "<|video_pad|>"})
    parts = [{"type": kind} for kind in ("video", "text", "image", "video")]
    parts[1] = TEXT
    text = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False
    )
    inputs = engine.processor(
        text=text.partition("<|assistant|>")[0],
        images=[Image.open(io.BytesIO(image))],
        videos=write_files(tmp_path, get_clip(), gif),
        add_special_tokens=False,
        return_tensors="np",
    )
    ids, prompt = inputs["input_ids"][0].tolist(), engine.prompts[-1]
    assert prompt[: len(ids)] == ids
    video = engine.processor.video_token_id
    assert prompt.count(video) == ids.count(video), "the text of the user has no video token"
    assert answer.usage.prompt_tokens == len(prompt)
    grids = inputs["video_grid_thw"]
    frames = [item for item in engine.items if prompt[item.start] == video]
    assert len(frames) == grids[:, 0].sum()
    pixels = np.concatenate([frame.arrays["pixel_values"] for frame in frames])
    np.testing.assert_array_equal(pixels, inputs["pixel_values_videos"])
    for item in engine.items:
        tokens = {*prompt[item.start : item.start + item.length]}
        assert tokens in ({video}, {engine.processor.image_token_id})
        assert ("image_times" in item.arrays) == (tokens == {video})


def test_frames_have_one_key_in_each_request(client, engine):
    ask(client, part(get_clip()), TEXT)
    first = [item.key for item in engine.items]
    ask(client, TEXT, part(write_gif(make_frames(5))), part(get_clip()))
    keys = [item.key for item in engine.items]
    assert keys[-len(first) :] == first
    assert len({*keys}) == len(keys)


class Files(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/a.mp4" else 302)
        self.end_headers()
        self.wfile.write(get_clip())

    def log_message(self, *_):
        pass


def test_videos_are_downloaded_from_allowed_hosts_only(client, engine):
    get_clip()
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        ask(client, part(f"{root}/a.mp4"))
        downloaded = [item.key for item in engine.items]
        for address, message in (
            (f"{root}/b.mp4", "status 302"),
            (f"http://localhost:{server.server_port}/a.mp4", "does not download videos from"),
            ("file:///etc/passwd", "a video must be a data: URL or an http"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(client, part(address))
        server.shutdown()
    ask(client, part(get_clip()))
    assert downloaded == [item.key for item in engine.items]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (part("data:video/mp4,abc"), "must contain base64: data:video/mp4;base64"),
        (part("data:video/mp4;base64,%"), "is not valid base64 text"),
        ({"type": "video_url"}, "is missing"),
        ({"type": "video_url", "video_url": "x"}, "video_url"),
        ({"type": "video", "video": "a.mp4"}, "use text, refusal, image_url, video_url"),
    ],
)
def test_invalid_parts_are_refused_with_their_field(client, bad, message):
    with pytest.raises(openai.BadRequestError, match=message) as info:
        ask(client, TEXT, bad)
    assert str(info.value.param).startswith("messages[0].content[1].")


def test_limits_name_the_value_and_the_bound(client, monkeypatch):
    def get_message(*parts: Any) -> str:
        with pytest.raises(openai.BadRequestError) as info:
            ask(client, *parts)
        assert info.value.code == "invalid_video"
        return info.value.message

    gif = part(write_gif(make_frames(3)))
    assert "5 videos, and the limit is 4" in get_message(*[gif] * 5)
    limits = {"frames": (19, "20 frames"), "pixels": (3000, "3072 pixels in a frame")}
    limits |= {"seconds": (1.5, "2 seconds"), "values": (999, "exceed the limit of 999 pixels")}
    limits["bytes"] = (999, "larger than 999 bytes")
    for name, (most, message) in limits.items():
        with monkeypatch.context() as patch:
            lower: Any = replace(videos.VIDEO_LIMITS, **{name: most})
            patch.setattr(images, "VIDEO_LIMITS", lower)
            patch.setattr(videos, "VIDEO_LIMITS", lower)
            assert message in get_message(part(get_clip())), name


def test_hostile_files_return_400_and_the_server_answers(url):
    """Each file is refused with a short error, and damaged files are read as far as possible."""
    messages = {}
    with httpx.Client(base_url=url, timeout=120) as http:
        for name, make in {**HOSTILE, **DAMAGED}.items():
            body = {"messages": [{"role": "user", "content": [part(make())]}], "max_tokens": 1}
            answer = http.post("chat/completions", json=body)
            error = answer.json().get("error", {})
            messages[name] = answer.status_code, error.get("code"), error.get("message", "")
    assert {name for name, x in messages.items() if x[0] == 200} == {*DAMAGED}
    messages = {name: messages[name] for name in HOSTILE}
    wrong = {name: x for name, x in messages.items() if x[:2] != (400, "invalid_video")}
    assert not wrong
    assert all(len(message) < 500 and "/" not in message for _, _, message in messages.values())


def test_decoding_ends_when_the_client_leaves():
    clip = write_video(make_frames(600, 240, 320), rate=30)
    decoder, group = ClipDecoder(), JobGroup()
    sampling = Sampling(whole=True, num_frames=600, longest_edge=2**25)
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(decoder.read, clip, sampling, videos.VIDEO_LIMITS, group)
        time.sleep(0.3)
        group.cancel()
        with pytest.raises(PictureError, match="could not be decoded"):
            job.result(timeout=30)


def test_child_returns_the_frames_of_this_process():
    decoder = ClipDecoder()
    for data in (get_clip(), write_gif(make_frames(7, 33, 57))):
        ours, theirs = decoder.read(data, SAMPLING, videos.VIDEO_LIMITS), read_clip(data, SAMPLING)
        np.testing.assert_array_equal(ours.frames, theirs.frames)
        assert (ours.facts, ours.indices) == (theirs.facts, theirs.indices)


def test_model_without_videos_refuses_them():
    class ImageEngine(VideoEngine):
        input_names = ("input_ids", "pixel_values", "image_grid_thw")

    for engine, message in (
        (ImageEngine(), "does not accept videos: send text and images only"),
        (ScriptedEngine(tokenizer=byte_tokenizer(TEMPLATE)), "does not accept videos: send text"),
    ):
        with background(engine) as url:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            with pytest.raises(openai.BadRequestError, match=message) as info:
                ask(client, part("data:video/mp4;base64,AAAA"))
        assert info.value.param == "messages[0].content[0].video_url"


def test_template_without_videos_is_an_error():
    engine = VideoEngine()
    engine.tokenizer.chat_template = TEMPLATE.replace("part.type == 'video'", "false").replace(
        "{{ part.text }}", "{{ part.text or '' }}"
    )
    with background(engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        image = part(encode_image(), "image_url")
        with pytest.raises(openai.BadRequestError, match="does not support videos in") as info:
            ask(client, image, part(write_gif(make_frames(4))))
        assert info.value.param == "messages[0].content[1].video_url.url"


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(VIDEOS))
def test_replies_to_videos_equal_generate_with_and_without_cached_frames(name, tmp_path):
    from ed_models.auto import AutoEasyDeLModelForImageTextToText
    from ed_models.checkpoints.tokenizers import load_processor

    processor = save_checkpoint(name, tmp_path)
    flags = "--max-num-seqs 2 --max-num-seq-buckets 2 --page-size 16 --silent-mode "
    flags += "--max-model-len 320 --max-num-batched-tokens 32"
    engine = create_engine(parse_model_arguments([str(tmp_path), *flags.split()]))
    model = AutoEasyDeLModelForImageTextToText.from_pretrained(tmp_path)
    processor, before = load_processor(str(tmp_path)), engine.loop.runner.num_traces
    clips = get_clip(), write_gif(make_frames(10, seed=3), 250)
    image, replies, wanted = encode_image(), [], []
    with background(engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        for first, second in (clips, clips[::-1], clips):
            media = part(first), TEXT, part(image, "image_url"), TEXT, part(second)
            answer: Any = client.chat.completions.create(
                model=engine.model_name,
                messages=[{"role": "user", "content": [*media]}],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            replies.append((answer.prompt_token_ids, answer.choices[0].token_ids))
            kinds = [{"type": "video"}, TEXT, {"type": "image"}, TEXT, {"type": "video"}]
            inputs = processor(
                text=processor.apply_chat_template([{"role": "user", "content": kinds}]),
                images=[Image.open(io.BytesIO(image))],
                videos=write_files(tmp_path, first, second),
                add_special_tokens=False,
                return_tensors="np",
            )
            ids = inputs["input_ids"]
            names = {*model.input_names} - {"input_ids", "attention_mask"}
            arrays = {key: x for key, x in inputs.items() if key in names}
            out = model.generate(ids, **arrays, max_new_tokens=12, eos_token_id=[])
            wanted.append((ids[0].tolist(), out.sequences[0, ids.shape[1] :].tolist()))
    assert replies == wanted
    assert replies[0] != replies[1], "the videos have no effect"
    assert engine.loop.runner.num_traces == before
