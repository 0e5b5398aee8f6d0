"""Images that become several tokens and tiles, with the processors of checkpoints."""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import numpy as np
import pytest
from ed_data import DataError, build_loader, build_prompts
from ed_data.rows.example import RowImage
from ed_data.schema import PREFERENCE
from ed_data.tokens.images import ImageEncoder, round_up
from ed_models.body.unpadded import TileGrids

from tests.hostile_images import damaged, unusual
from tests.image_processors import PROCESSORS

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
    if encoder.sized:
        reduced = hasattr(processor, "vision_aspect_ratio")  # LLaVA-OneVision
        options = {"limit": 2, "may_be_whole": True} if reduced else {}
        grids = TileGrids.of(processor.image_processor.image_grid_pinpoints, 28, 14, **options)
    for height, width in np.exp(rng.uniform(2.0, 5.5, (count, 2))).astype(int):
        image = RowImage(np.zeros((height, width, 3), np.uint8), f"{height} x {width}")
        tokens = encoder.tokens(image)
        (size, *_) = encoder.width([[image]])
        assert size == round_up(tokens.tiles)
        expected = tokens.tiles, 4 * tokens.tiles
        if encoder.sized:  # features of padding are omitted
            expected = grids.sizes(int(height), int(width))
        assert (tokens.tiles, tokens.ids.count(encoder.feature)) == expected
    batch = encoder.arrays({0: [image]}, 1, encoder.width([[image]]))
    assert batch["pixel_values"].shape == (1, size, 3, 28, 28)
    assert np.isfinite(batch["pixel_values"]).all()


def test_batches_with_different_numbers_of_tiles_have_few_shapes():
    found = [round_up(count) for count in range(1, 65)]
    assert sorted(set(found)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(count <= size < 1.5 * count + 1 for count, size in enumerate(found, 1))


def test_image_that_the_processor_refuses_names_its_row(tokenizer):
    encoder = ImageEncoder(PROCESSORS["gemma3"](functools.partial(with_tokens, tokenizer)))
    stream = io.BytesIO(b"no image")
    with pytest.raises(DataError, match="row 7"):
        encoder.tokens(RowImage(stream.getvalue(), "row 7"))


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return ImageEncoder(PROCESSORS["gemma3"](functools.partial(with_tokens, tokenizer)))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_images_name_their_row(encoder):
    for name, data in damaged().items():
        with pytest.raises(DataError, match=r"^row 7: the image cannot be decoded"):
            pytest.fail(f"{name}: {encoder.process_image(RowImage(data, 'row 7'))}")


@pytest.mark.parametrize("name", unusual())
def test_unusual_image_has_the_pixels_of_transformers(encoder, name):
    from transformers.image_utils import load_image

    loaded = load_image(Image.open(io.BytesIO(unusual()[name])))
    expected = encoder.processor.image_processor(images=[loaded], return_tensors="np")
    got = encoder.process_image(RowImage(unusual()[name], "row 7"))
    assert np.array_equal(got["pixel_values"], expected["pixel_values"])


def test_limits_of_images_are_checked_before_decoding(encoder, monkeypatch):
    image = RowImage(unusual()["gray"], "row 7")
    monkeypatch.setattr("ed_data.tokens.images.MAX_PIXELS", 1199)
    with pytest.raises(DataError, match=r"row 7: .* 40 x 30 pixels, and the limit is 1199 pixels"):
        encoder.process_image(image)
    monkeypatch.setattr("ed_data.tokens.images.MAX_BYTES", 10)
    with pytest.raises(DataError, match=r"row 7: .* more than 10 bytes"):
        encoder.process_image(image)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_images_can_be_skipped_and_need_no_memory(mixture, jsonl, encoder, tmp_path):
    import resource

    whole = rows(tmp_path, [(30, 40)], [(20, 20)])
    bad = []
    for number, data in enumerate(damaged().values()):
        (tmp_path / f"bad{number}").write_bytes(data)
        bad.append({**whole[0], "images": [f"bad{number}"]})
    inform = {"data_files": jsonl([whole[0], *bad, whole[1]]), "content_field": "messages"}
    processor, peaks = encoder.processor, []
    for _ in range(6):
        made = mixture(informs=[{**inform, "on_error": "skip"}], pack_tokens=False)
        loader = build_loader(made, batch_size=2, seq_length=64, processor=processor)
        batch = loader.batch_at(0)
        assert (batch["segment_ids"] > 0).any(axis=1).all()
        for image in (RowImage(data, "row 7") for data in damaged().values()):
            with pytest.raises(DataError):
                encoder.process_image(image)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[-1] - peaks[1] < 16 * 1024, peaks  # kibibytes


def test_both_answers_of_a_pair_contain_the_images_of_the_prompt(mixture, jsonl, encoder, tmp_path):
    pairs = []
    for chat in rows(tmp_path, [(30, 40)], [(90, 20), (28, 28)], []):
        question, answer = chat.pop("messages")
        other = {**answer, "content": "a dog sat"}
        pairs.append({**chat, "prompt": [question], "chosen": [answer], "rejected": [other]})
    made = mixture(informs=[{"data_files": jsonl(pairs)}], pack_tokens=False, seed=0)
    options = {"batch_size": 3, "seq_length": 64, "shuffle": False, "schema": PREFERENCE}
    batch = build_loader(made, processor=encoder.processor, **options).batch_at(0)
    for side in ("chosen", "rejected"):
        placeholders = batch[f"{side}_input_ids"] == encoder.feature
        assert placeholders.sum(axis=1).tolist() == [4, 8, 0]
        assert (batch[f"{side}_labels"][placeholders] == -100).all()
    assert batch["pixel_values"].any(axis=(2, 3, 4)).sum(axis=1).tolist() == [1, 2, 0]


def test_prompts_of_rollouts_have_the_arrays_of_their_images(mixture, jsonl, encoder, tmp_path):
    chats = rows(tmp_path, [(30, 40)], [(90, 20), (28, 28)], [])
    asked = [{"prompt": chat["messages"][:1], "images": chat["images"]} for chat in chats]
    made = mixture(informs=[{"data_files": jsonl(asked), "content_field": "prompt"}])
    loader = build_prompts(made, processor=encoder.processor, batch_size=3, shuffle=False)
    batch = loader.batch_at(0)
    assert [ids.count(encoder.feature) for ids in batch.input_ids] == [4, 8, 0]
    first = Image.open(tmp_path / chats[1]["images"][0])
    expected = encoder.processor.image_processor(images=[first], return_tensors="np")
    assert np.array_equal(batch.images["pixel_values"][1, :1], expected["pixel_values"])
    assert not batch.images["pixel_values"][2].any()
