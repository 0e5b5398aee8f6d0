"""Images that become several tokens and tiles, with the processors of checkpoints."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.rows.example import RowImage
from ed_data.tokens.images import ImageEncoder

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
SIZE = {"height": 28, "width": 28}


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


def gemma3(tokenizer: Any) -> Any:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    special = {"boi_token": "<start>", "image_token": "<soft>", "eoi_token": "<end>"}
    own = with_tokens(tokenizer, "<start>", "<soft>", "<end>", **special)
    images = Gemma3ImageProcessorPil(size=SIZE)
    return transformers.Gemma3Processor(images, own, own.chat_template, image_seq_length=4)


def paligemma(tokenizer: Any) -> Any:
    import transformers
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    own = with_tokens(tokenizer, "<image>", image_token="<image>")
    images: Any = SiglipImageProcessorPil(size=SIZE)
    images.image_seq_length = 4
    return transformers.PaliGemmaProcessor(images, own, own.chat_template)


def idefics3(tokenizer: Any) -> Any:
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    names = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    own = with_tokens(tokenizer, "<image>", *names)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 84}, max_image_size=SIZE_OF_TILE)
    return transformers.Idefics3Processor(images, own, 4, own.chat_template)


SIZE_OF_TILE = {"longest_edge": 28}
PROCESSORS = {"gemma3": gemma3, "paligemma": paligemma, "idefics3": idefics3}


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request, tokenizer):
    return PROCESSORS[request.param](tokenizer)


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
        for name in ("pixel_values", "pixel_attention_mask"):
            if name not in output:
                continue
            expected = np.asarray(output[name])
            expected = expected[0] if expected.ndim == batch[name].ndim else expected
            assert np.array_equal(batch[name][number][: len(expected)], expected)
            assert not batch[name][number][len(expected) :].any()


def test_token_types_mark_the_tokens_after_the_prompt(mixture, jsonl, tokenizer, tmp_path):
    chats = rows(tmp_path, [(30, 40)], [(20, 20)])
    inform = {"data_files": jsonl(chats), "content_field": "messages"}
    options = {"assistant_only_loss": True}
    made = mixture(informs=[inform], tokenization=options, pack_tokens=True, pack_seq_length=120)
    batch = build_loader(made, batch_size=1, processor=paligemma(tokenizer)).batch_at(0)
    types, segments = batch["token_type_ids"][0], batch["segment_ids"][0]
    assert segments.max() == 2
    for segment in (1, 2):
        own, labels = types[segments == segment], batch["labels"][0][segments == segment]
        first = int(np.argmax(labels >= 0))
        assert own.tolist() == [0] * first + [1] * (len(own) - first)


@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_placeholder_tokens_equal_features_for_images_of_any_size(processor, count):
    """The number of tiles follows from the arrays, and each tile has four features."""
    encoder, rng = ImageEncoder(processor), np.random.default_rng(0)
    for height, width in np.exp(rng.uniform(2.0, 5.5, (count, 2))).astype(int):
        image = RowImage(np.zeros((height, width, 3), np.uint8), f"{height} x {width}")
        tokens = encoder.tokens(image)
        (size,) = encoder.width([[image]])
        assert tokens.ids.count(encoder.feature) == 4 * tokens.tiles == 4 * size
    batch = encoder.arrays({0: [image]}, 1, (size,))
    assert batch["pixel_values"].shape == (1, size, 3, 28, 28)
    assert np.isfinite(batch["pixel_values"]).all()


def test_image_that_the_processor_refuses_names_its_row(tokenizer):
    encoder = ImageEncoder(gemma3(tokenizer))
    stream = io.BytesIO(b"no image")
    with pytest.raises(DataError, match="row 7"):
        encoder.tokens(RowImage(stream.getvalue(), "row 7"))
