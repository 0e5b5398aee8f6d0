"""The files that a row, a forward pass and a request execute: the route of a reader.

Each walk runs once to import and compile, and once traced. A file counts if a function that is
defined in it with `def` runs. The walk of a training method counts the files of the method only:
its options and functions, without the trainer, the engine and the model. The walk `learning_rate`
counts the files on the way of an option from a run file to optax.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType, MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

if TYPE_CHECKING:
    from ed_esurge.server.app import Engines
    from ed_models.families.llama import LlamaForCausalLM

Walk = Callable[[], object]
#: The walks of training methods, and the files that belong to a method.
METHODS = ("dpo", "grpo")
METHOD_FILE = re.compile(r"ed_trainers/((methods|losses|options|online)/|arguments\.py)")
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
#: A learning rate that no other value equals, and the functions to which it is carried.
RATE = 1.2345e-3
RATE_READERS = ("build_schedule", "build_optimizer")
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def trace_walk(name: str) -> dict[str, list[str]]:
    """Return the functions that a walk executes, by file, in the order of their first call.

    A background thread may still work for an earlier call, so the shorter of two traces counts.
    """
    walk = WALKS[name]()
    if name == "learning_rate":
        return trace_rate(walk)
    walk()
    files = min((trace_call(walk) for _ in range(2)), key=len)
    if name in METHODS:
        return {file: names for file, names in files.items() if METHOD_FILE.match(file)}
    return files


def trace_call(walk: Walk) -> dict[str, list[str]]:
    """Call a walk, and return the functions that all threads execute, by file."""
    files: dict[str, dict[str, None]] = defaultdict(dict)
    with trace_calls(files):
        walk()
    return {file: list(functions) for file, functions in files.items()}


@contextmanager
def trace_calls(files: Mapping[str, dict[str, None]]) -> Iterator[None]:
    """Add the functions of this project that all threads call to their files."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file = get_file(frame)
        if event == "call" and file:
            files[file].setdefault(frame.f_code.co_qualname)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def get_file(frame: FrameType) -> str:
    """Return the file of a named function of this project; empty for another function."""
    code = frame.f_code
    file = re.split(r"/(?:src|site-packages)/", code.co_filename)[-1]
    return file if file.startswith("ed_") and not code.co_name.startswith("<") else ""


def trace_rate(walk: Walk) -> dict[str, list[str]]:
    """Call a walk, and return the functions that carry `RATE` to the optimizer, by file.

    A function carries the rate if it returns the rate, stores the rate in its object, or passes the
    rate to a function that carries it or is one of `RATE_READERS`. The rate may be a number, part
    of a text or of nested values, or a field of options. After options have the rate, a text only
    describes the run, so that functions of such texts do not count.
    """
    files: dict[str, dict[str, None]] = defaultdict(dict)
    calls: list[tuple[FrameType, bool]] = []  # and whether the function receives the rate
    passing: set[FrameType] = set()
    forms: set[type] = {float, str}  # the types of values that have the rate

    def has_value(value: object) -> bool:
        if BaseModel not in forms and has_rate(value, {BaseModel}):
            forms.symmetric_difference_update({str, BaseModel})
        return has_rate(value, forms)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file, code = get_file(frame), frame.f_code
        if event not in ("call", "return") or not file:
            return
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            calls.append((frame, any(has_value(frame.f_locals.get(name)) for name in names)))
            return
        while calls and calls[-1][0] is not frame:
            calls.pop()
        receives = bool(calls) and calls.pop()[1]
        reads = code.co_name in RATE_READERS and file.startswith("ed_trainers/optimizers/")
        stores = receives and has_value(list(get_attributes(frame.f_locals.get("self")).values()))
        if not (reads or stores or frame in passing or has_value(argument)):
            return
        files[file].setdefault(code.co_qualname)
        if receives and calls:
            passing.add(calls[-1][0])
        if reads and code.co_name == RATE_READERS[-1]:
            sys.setprofile(None)
            for caller in passing & {frame for frame, _ in calls}:
                files[get_file(caller)].setdefault(caller.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return {file: list(functions) for file, functions in files.items()}


def has_rate(value: object, forms: Collection[type], depth: int = 3) -> bool:
    """Return whether a value is or contains `RATE`.

    Args:
        value: any value.
        forms: `float` if a number may be the rate, `str` if a text may contain the rate,
            `BaseModel` if options may.
        depth: number of nested lists.
    """
    if isinstance(value, float):
        return float in forms and value == RATE
    if isinstance(value, str):
        return str in forms and str(RATE) in value
    if isinstance(value, BaseModel):
        return BaseModel in forms and getattr(value, "learning_rate", None) == RATE
    values = list(value.values()) if type(value) is dict else value
    if not isinstance(values, list | tuple) or not depth:
        return False
    return any(has_rate(item, forms, depth - 1) for item in values)


def get_attributes(value: object) -> dict[str, object]:
    """Return the attributes of an object that is no record of options."""
    return {} if isinstance(value, BaseModel) else dict(getattr(value, "__dict__", {}))


def create_llama(**changes: object) -> LlamaForCausalLM:
    """Return a Llama of a few thousand parameters."""
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM.create(LlamaConfig(**{**TEXT, **changes}))


def walk_forward() -> Walk:
    """One forward pass of a tiny Llama."""
    import jax.numpy as jnp

    model = create_llama()
    return lambda: model(jnp.arange(16).reshape(1, 16))


def walk_row() -> Walk:
    """The first batch of a mixture of preference rows."""
    from ed_data.batches.loader import Loader
    from ed_data.build import build_loader
    from ed_data.config import Mixture
    from ed_data.schema import PREFERENCE
    from ed_esurge.testing import byte_tokenizer

    folder = Path(tempfile.mkdtemp())
    row = json.dumps({"prompt": "hi", "chosen": "good", "rejected": "bad"})
    (folder / "pairs.jsonl").write_text(f"{row}\n" * 8)
    informs = [{"type": "json", "data_files": str(folder / "pairs.jsonl")}]
    tokenizer = byte_tokenizer()

    def walk() -> None:
        cache = tempfile.mkdtemp(dir=folder)
        mixture = Mixture.model_validate({"informs": informs, "cache_dir": cache})
        loader = build_loader(mixture, tokenizer, batch_size=2, seq_length=32, schema=PREFERENCE)
        assert isinstance(loader, Loader)
        loader.batch_at(0)
        loader.close()

    return walk


def walk_chat() -> Walk:
    """A chat request through the application to a scripted engine."""
    from ed_esurge.testing import ScriptedEngine

    return post_chat(ScriptedEngine(), "hello")


def post_chat(engine: Engines, content: object) -> Walk:
    """Return a walk that sends one chat request to an application with this engine."""
    import httpx
    from ed_esurge.server.app import create_app

    app = create_app(engine)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    loop = asyncio.new_event_loop()
    loop.run_until_complete(app.router.lifespan_context(app).__aenter__())
    transport = httpx.ASGITransport(app=app)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def walk() -> None:
        response = loop.run_until_complete(client.post("/v1/chat/completions", json=body))
        assert response.status_code == 200, response.text

    return walk


def walk_engine() -> Walk:
    """Four tokens of a tiny Llama from `eSurge.generate`."""
    from ed_esurge import SamplingParams, eSurge

    serving = eSurge(
        create_llama(num_hidden_layers=1),
        max_model_len=32,
        max_num_seqs=1,
        page_size=8,
        max_num_batched_tokens=16,
    )
    prompts = iter(([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]))
    sampling = SamplingParams(max_tokens=4, temperature=0)
    return lambda: serving.generate([next(prompts)], sampling)


def walk_image() -> Walk:
    """A chat request with an image, through the application and the engine, to tokens."""
    from ed_esurge import eSurge
    from ed_esurge.engine.async_engine import AsyncEngine
    from ed_esurge.testing import byte_tokenizer
    from ed_models.families.llava import LlavaConfig, LlavaForConditionalGeneration
    from PIL import Image
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    sizes = {"shortest_edge": 8}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=sizes, crop_size={"height": 8, "width": 8}),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="full",
        image_token="<image>",
        num_additional_image_tokens=0,
        chat_template=tokenizer.chat_template,
    )
    fields: dict[str, Any] = {
        "text_config": {"model_type": "llama", **TEXT, "vocab_size": len(tokenizer)},
        "vision_config": VISION,
        "image_token_index": image_token,
    }
    config = LlavaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    model = LlavaForConditionalGeneration.create(config)
    engine = eSurge(model, tokenizer, processor=processor, max_model_len=64, max_num_seqs=1)
    data = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hi"}]
    return post_chat(AsyncEngine(engine), parts)


def walk_dpo() -> Walk:
    """One step of `dpo`, from options to updated weights."""
    import numpy as np

    tokens = np.arange(64, dtype=np.int32).reshape(8, 8)
    side = {
        "input_ids": tokens,
        "segment_ids": np.ones_like(tokens),
        "position_ids": np.indices(tokens.shape, np.int32)[1],
        "labels": tokens,
    }
    pairs = {f"{name}_{key}": x for name in ("chosen", "rejected") for key, x in side.items()}
    return train_one_step("dpo", lambda step: pairs)


def walk_grpo() -> Walk:
    """One step of `grpo`, from options to updated weights."""
    from ed_trainers.rollout import Sampled

    class Prompts(NamedTuple):
        input_ids: list[list[int]]
        fields: dict[str, list]

    class Completing:
        def generate(self, prompts, params, weights, *, seeds=None):  # type: ignore[no-untyped-def]
            return [Sampled([seed % 9], [-4.0], weights.version, True) for seed in seeds or ()]

    sizes = {"num_return_sequences": 4, "max_prompt_length": 4, "max_completion_length": 4}
    return train_one_step(
        "grpo",
        lambda step: Prompts([[1, 2], [3]], {}),
        sizes,
        rollout=Completing(),
        reward_functions=[lambda completion_ids: [float(ids[0]) for ids in completion_ids]],
    )


def train_one_step(
    method: str,
    batch_at: Callable[[int], object],
    options: Mapping[str, Any] = MappingProxyType({}),
    **objects: Any,
) -> Walk:
    """Return a walk that trains a tiny Llama for one step with a batch of eight rows."""
    from ed_trainers import arguments_class, trainer_class

    def walk() -> None:
        arguments = arguments_class(method)(
            max_training_steps=1,
            total_batch_size=8,
            save_directory=tempfile.mkdtemp(),
            use_tensorboard=False,
            progress_bar_type="none",
            do_last_save=False,
            **options,
        )
        dataset: Any = SimpleNamespace(batch_at=batch_at, steps_per_epoch=1, fingerprint="walk")
        trainer_class(method)(arguments, create_llama(), dataset, **objects).train()

    return walk


def walk_learning_rate() -> Walk:
    """The option `learning_rate`, from a run file to the optimizer."""
    from ed_elarge.command.runs import run_file
    from ed_esurge.testing import byte_tokenizer

    folder, tokenizer = Path(tempfile.mkdtemp()), byte_tokenizer()
    create_llama(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text('{"content": "a text of a few words"}\n' * 8)
    trainer = {"trainer_type": "sft", "total_batch_size": 8, "max_training_steps": 1}
    trainer |= {"do_last_save": False, "use_tensorboard": False, "progress_bar_type": "none"}
    trainer |= {"save_directory": str(folder / "run"), "learning_rate": RATE}
    informs = [{"type": "json", "data_files": str(folder / "rows.jsonl")}]
    run = {
        "model": {"name_or_path": str(folder / "model")},
        "mixture": {"informs": informs, "tokenization": {"max_length": 32}},
        "trainer": trainer,
        "actions": ["train"],
    }
    (folder / "run.yaml").write_text(json.dumps(run, indent=1))

    def walk() -> None:
        with redirect_stdout(io.StringIO()):
            assert run_file(str(folder / "run.yaml")) == 0

    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "chat": walk_chat,
    "dpo": walk_dpo,
    "engine": walk_engine,
    "forward": walk_forward,
    "grpo": walk_grpo,
    "image": walk_image,
    "learning_rate": walk_learning_rate,
    "row": walk_row,
}
