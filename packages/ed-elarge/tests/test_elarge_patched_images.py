"""A run file trains a vision-language model on chats with images of different sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml
from ed_elarge import eLargeModel
from ed_elarge.__main__ import run_file
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.testing import require_torch

Image = pytest.importorskip("PIL.Image")

TASK = "image-text-to-text"
TOKENS = ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = [(30, 40), (8, 8), (50, 20), (20, 21)]


class Qwen2VLProcessor(transformers.Qwen2VLProcessor):
    """The processor without videos, which would need torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-VL with its processor."""
    from ed_data import train_bpe

    path = tmp_path_factory.mktemp("qwen2_vl")
    tokens = train_bpe(["a cat sat on a mat", "the dog ran away"] * 20, 300)
    tokens.add_special_tokens({"additional_special_tokens": TOKENS})
    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, size=size)
    Qwen2VLProcessor(images, tokens, TEMPLATE).save_pretrained(path)
    image, video = tokens.convert_tokens_to_ids(TOKENS)
    config = registry.get_config("qwen2_vl")(
        text_config={
            "vocab_size": len(tokens),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 24,
            "hidden_size": 32,
            "num_heads": 3,
            "patch_size": 4,
        },
        image_token_id=image,
        video_token_id=video,
    )
    module = registry.get_module(TaskType.IMAGE_TEXT_TO_TEXT, "qwen2_vl")
    module.create(config, seed=0).save_pretrained(path)
    return path


def chats(folder: Path) -> str:
    rows = []
    for number in range(16):
        names = [str(folder / f"{number}-{image}.png") for image in range(number % 3)]
        for image, name in enumerate(names):
            Image.new("RGB", SIZES[(number + image) % 4], (15 * number, 99, 7)).save(name)
        question = [*[{"type": "image"}] * len(names), {"type": "text", "text": "what is it"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "a cat" if number % 2 else "the dog"},
        ]
        rows.append({"messages": messages, "images": names})
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def model_of(path: Path) -> Any:
    return eLargeModel.from_pretrained(str(path), task=TASK).build_model()


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("packing", [False, True])
def test_model_trains_on_chats_with_images_of_different_sizes(
    checkpoint: Path, tmp_path: Path, packing: bool
) -> None:
    length = {"pack_seq_length": 192} if packing else {"tokenization": {"max_length": 160}}
    document = {
        "model": {"name_or_path": str(checkpoint), "task": TASK},
        "mixture": {
            "informs": [{"data_files": chats(tmp_path), "content_field": "messages"}],
            "batch_size": 8,
            "prefetch_workers": 0,
            "pack_tokens": packing,
            **length,
        },
        "trainer": {
            "trainer_type": "sft",
            "max_training_steps": 2,
            "total_batch_size": 8,
            "learning_rate": 1e-2,
            "weight_decay": 0.0,
            "save_directory": str(tmp_path / "run"),
            "log_steps": 1,
            "use_tensorboard": False,
        },
        "actions": ["train"],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    assert run_file(str(tmp_path / "run.yaml")) == 0
    saved = tmp_path / "run" / "model"
    before, ours = model_of(checkpoint), model_of(saved)
    for kernel in ("visual", "language_model"):
        changed = [
            not np.array_equal(old, new)
            for old, new in zip(*map(_kernels(kernel), (before, ours)), strict=True)
        ]
        assert any(changed), f"{kernel} was not trained"
    from ed_models.checkpoints.tokenizers import load_processor

    torch = require_torch()
    images = [Image.new("RGB", size, (200, 30, 9)) for size in SIZES[::2]]
    text = f"user:{TOKENS[0]}{TOKENS[0]}what is it\n".replace("><", "> <")
    inputs = load_processor(str(saved))(text=text, images=images, return_tensors="np")
    arrays = {name: torch.from_numpy(np.asarray(x)) for name, x in inputs.items()}
    theirs: Any = transformers.Qwen2VLForConditionalGeneration.from_pretrained(saved).eval()
    with torch.no_grad():
        expected = theirs(**arrays).logits.numpy()
    names = ("pixel_values", "image_grid_thw")
    batched = {name: np.asarray(inputs[name])[None] for name in names}
    got = ours(np.asarray(inputs["input_ids"]), **batched).logits
    np.testing.assert_allclose(got, expected, atol=1e-4)


def _kernels(part: str) -> Any:
    from flax import nnx

    def kernels(model: Any) -> list[np.ndarray]:
        flat = nnx.to_flat_state(model.split_module()[1])
        return [np.asarray(leaf.get_value()) for path, leaf in flat if part in path]

    return kernels
