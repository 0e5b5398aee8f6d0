"""Images of different sizes in chat requests: replies equal `generate` of the model."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import openai
import pytest
import transformers
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer
from PIL import Image

from tests.image_checkpoints import save_checkpoint

TOKENS = ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}<|assistant|>"
)


class Qwen2VLProcessor(transformers.Qwen2VLProcessor):
    """The processor without videos, which would need torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


@pytest.fixture(scope="module", params=["qwen2_vl", "kimi_k25", "gemma4"])
def checkpoint(request, tmp_path_factory) -> Path:
    """Directory of a tiny random model with its processor."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen2_vl":
        save_qwen2_vl(path)
    else:
        save_checkpoint(request.param, path)
    return path


def save_qwen2_vl(path: Path) -> None:
    """Save a tiny random Qwen2-VL with its processor."""
    from ed_models.families.qwen2_vl import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers import Qwen2VLImageProcessorPil

    tokens = byte_tokenizer(TEMPLATE)
    tokens.add_special_tokens({"additional_special_tokens": TOKENS})
    image, video = tokens.convert_tokens_to_ids(TOKENS)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokens),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "bos_token_id": None,
            "eos_token_id": None,
            "initializer_range": 0.3,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 24,
            "hidden_size": 32,
            "num_heads": 3,
            "patch_size": 4,
            "initializer_range": 0.3,
        },
        image_token_id=image,
        video_token_id=video,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    Qwen2VLForConditionalGeneration.create(config, seed=5).save_pretrained(path)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = Qwen2VLImageProcessorPil(patch_size=4, size=size)
    Qwen2VLProcessor(images, tokens, TEMPLATE).save_pretrained(path)


def encoded(color: str, size: tuple[int, int]) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, "PNG")
    return data.getvalue()


def part(data: bytes) -> dict:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.nightly
def test_reply_to_images_of_different_sizes_equals_generate_and_compiles_nothing(checkpoint):
    from ed_models.auto import AutoEasyDeLModelForImageTextToText
    from ed_models.checkpoints.tokenizers import load_processor

    flags = "--max-num-seqs 2 --max-num-seq-buckets 2 --page-size 16 --silent-mode "
    if checkpoint.name.startswith("gemma4"):  # a step computes the tokens of an image together
        flags += "--max-model-len 176 --max-num-batched-tokens 180"
    else:
        flags += "--max-model-len 64 --max-num-batched-tokens 16"
    engine = create_engine(parse_model_arguments([str(checkpoint), *flags.split()]))
    model = AutoEasyDeLModelForImageTextToText.from_pretrained(checkpoint)
    processor = load_processor(str(checkpoint))
    text, before = {"type": "text", "text": "and"}, engine.loop.runner.num_traces
    small, wide = encoded("red", (24, 16)), encoded("blue", (40, 17))
    with background(engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        replies, wanted = [], []
        for first, second in ((small, wide), (wide, small), (small, small)):
            answer = client.chat.completions.create(
                model=engine.model_name,
                messages=[{"role": "user", "content": [part(first), text, part(second)]}],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            choice = answer.choices[0]
            replies.append((answer.prompt_token_ids, choice.token_ids))
            image = {"type": "image"}
            messages = [{"role": "user", "content": [image, text, image]}]
            inputs = processor(
                text=processor.apply_chat_template(messages),
                images=[Image.open(io.BytesIO(data)) for data in (first, second)],
                add_special_tokens=False,
                padding=False,
                return_tensors="np",
            )
            ids = inputs["input_ids"]
            images = {name: x for name, x in inputs.items() if name in model.input_names}
            images = {name: x for name, x in images.items() if name.startswith(("pixel", "image"))}
            out = model.generate(ids, **images, max_new_tokens=12, eos_token_id=[])
            wanted.append((ids[0].tolist(), out.sequences[0, ids.shape[1] :].tolist()))
    assert replies == wanted
    assert len({tuple(tokens) for _, tokens in replies}) == 3, "the images have no effect"
    assert engine.loop.runner.num_traces == before
