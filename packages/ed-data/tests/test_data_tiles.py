"""Images that become several tokens and tiles, with the processors of checkpoints."""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.rows.example import RowImage
from ed_data.tokens.images import ImageEncoder
from ed_models.body.unpadded import TileGrids

from tests.image_processors import GRIDS, PROCESSORS

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


def with_tokens(tokenizer: Any, image: str, *names: str, **special: str) -> Any:
    """Return a copy of the tokenizer with special tokens, tokens of lines, and a template."""
    own = pickle.loads(pickle.dumps(tokenizer))
    own.add_tokens(["\n\n", "\n\n\n"])
    own.add_special_tokens({"additional_special_tokens": [image, *names]})
    for name, token in special.items():
        setattr(own, name, token)
        setattr(own, f"{name}_id", own.convert_tokens_to_ids(token))
    own.chat_template = TEMPLATE.replace("IMAGE", image)
    return own


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request, tokenizer):
    return PROCESSORS[request.param](functools.partial(with_tokens, tokenizer))


def picture(size: tuple[int, int], seed: int = 0) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def rows(tmp_path, *sizes: list[tuple[int, int]]) -> list[dict]:
    """Chats with images of these sizes: the images, a question, an answer."""
    found = []
    for number, of_row in enumerate(sizes):
        names = []
        for place, size in enumerate(of_row):
            names.append(f"{number}-{place}.png")
            picture(size, number).save(tmp_path / names[-1])
        parts = [{"type": "image"}] * len(of_row) + [{"type": "text", "text": f"what {number}"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]
        found.append({"messages": messages, "images": names})
    return found


@pytest.mark.daily("gemma3", "idefics3")
def test_batch_equals_output_of_the_processor(mixture, jsonl, processor, tmp_path):
    chats = rows(tmp_path, [(30, 40)], [(90, 20), (16, 50), (28, 28)], [])
    inform = {"data_files": jsonl(chats), "content_field": "messages"}
    made = mixture(informs=[inform], pack_tokens=False, seed=0)
    loader = build_loader(made, batch_size=3, seq_length=200, shuffle=False, processor=processor)
    batch = loader.batch_at(0)
    for number, chat in enumerate(chats):
        files = [Image.open(tmp_path / name).convert("RGB") for name in chat["images"]]
        text = processor.tokenizer.apply_chat_template(chat["messages"], tokenize=False)
        used = batch["segment_ids"][number] > 0
        got = batch["input_ids"][number][used].tolist()
        if not files:
            assert got == processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert not batch["pixel_values"][number].any()
            continue
        options = processor._merge_kwargs(return_tensors="np")["images_kwargs"]
        output, texts = processor._process_images([files], **options)
        whole = iter(texts)
        first, *rest = text.split(processor.image_token)
        text = first + "".join(next(whole) + part for part in rest)
        assert got == processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        for name in ("pixel_values", "pixel_attention_mask", "image_sizes"):
            if name not in output:
                continue
            expected = np.asarray(output[name])
            if name == "pixel_values" and "image_sizes" in output:  # padded tiles of each image
                images = zip(expected, expected.any(axis=(2, 3, 4)), strict=True)
                expected = np.concatenate([tiles[real] for tiles, real in images])
            expected = expected[0] if expected.ndim == batch[name].ndim else expected
            assert np.array_equal(batch[name][number][: len(expected)], expected)
            assert not batch[name][number][len(expected) :].any()


def test_token_types_mark_the_tokens_after_the_prompt(mixture, jsonl, tokenizer, tmp_path):
    chats = rows(tmp_path, [(30, 40)], [(20, 20)])
    inform = {"data_files": jsonl(chats), "content_field": "messages"}
    options = {"assistant_only_loss": True}
    processor = PROCESSORS["paligemma"](functools.partial(with_tokens, tokenizer))
    made = mixture(informs=[inform], tokenization=options, pack_tokens=True, pack_seq_length=120)
    batch = build_loader(made, batch_size=1, processor=processor).batch_at(0)
    types, segments = batch["token_type_ids"][0], batch["segment_ids"][0]
    assert segments.max() == 2
    for segment in (1, 2):
        own, labels = types[segments == segment], batch["labels"][0][segments == segment]
        first = int(np.argmax(labels >= 0))
        assert own.tolist() == [0] * first + [1] * (len(own) - first)


@pytest.mark.daily("gemma3-100", "idefics3-100")
@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_placeholder_tokens_equal_features_for_images_of_any_size(processor, count):
    """The number of tiles follows from the arrays, and each tile has four features."""
    encoder, rng = ImageEncoder(processor), np.random.default_rng(0)
    for height, width in np.exp(rng.uniform(2.0, 5.5, (count, 2))).astype(int):
        image = RowImage(np.zeros((height, width, 3), np.uint8), f"{height} x {width}")
        tokens = encoder.tokens(image)
        (size, *_) = encoder.width([[image]])
        expected = size, 4 * size
        if encoder.sized:  # features of padding are omitted
            expected = TileGrids.of(GRIDS, 28, 14).sizes(int(height), int(width))
        assert (tokens.tiles, tokens.ids.count(encoder.feature)) == expected
    batch = encoder.arrays({0: [image]}, 1, encoder.width([[image]]))
    assert batch["pixel_values"].shape == (1, size, 3, 28, 28)
    assert np.isfinite(batch["pixel_values"]).all()


def test_image_that_the_processor_refuses_names_its_row(tokenizer):
    encoder = ImageEncoder(PROCESSORS["gemma3"](functools.partial(with_tokens, tokenizer)))
    stream = io.BytesIO(b"no image")
    with pytest.raises(DataError, match="row 7"):
        encoder.tokens(RowImage(stream.getvalue(), "row 7"))
