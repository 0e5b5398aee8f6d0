"""Chats with images: placeholder tokens, pixel values, packing, truncation and errors."""

from __future__ import annotations

import base64
import io
import json
import pickle

import numpy as np
import pytest
from ed_data import DataError, build_loader, build_prompts, documents
from ed_data.config import Inform
from ed_data.schema import COMPLETION, EMBEDDING, LABELLED, PREFERENCE, PROMPT, TEXT

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] if message['content'] is string else message['content'][0]['text'] }}"
    "{{ eos_token }}{% endgeneration %}"
    "{% elif message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FEATURES = 4  # (28 / 14)² patches of an image


@pytest.fixture(scope="module")
def processor(tokenizer):
    """A LLaVA processor with CLIP's image processor, which runs without torch."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    own = pickle.loads(pickle.dumps(tokenizer))
    own.add_special_tokens({"additional_special_tokens": ["<image>"]})
    own.chat_template = TEMPLATE
    size = {"height": 28, "width": 28}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=own,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def png(value: int, size: tuple[int, int] = (30, 40)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (value, 255 - value, 3)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def pictures(tmp_path):
    """Eight files, `0.png` to `7.png`, with different colors and sizes."""
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(png(20 * i, (30 + i, 40)))
    return tmp_path


def user(text: str, images: int = 1) -> dict:
    parts = [{"type": "image"}] * images
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def chat(number: int, images: int = 1) -> dict:
    names = [f"{(number + i) % 8}.png" for i in range(images)]
    answer = {"role": "assistant", "content": f"answer {number}"}
    return {"messages": [user(f"question {number}?", images), answer], "images": names}


def loader_of(mixture, jsonl, processor, rows, schema=TEXT, **options):
    kind = {"content_field": "messages"} if schema == TEXT else {}
    inform = {"data_files": jsonl(rows), **kind, **options.pop("inform", {})}
    given = {"pack_tokens": False, "seed": 0, **options}
    made = mixture(informs=[inform], **given)
    size = None if made.pack_tokens else 96
    return build_loader(
        made, batch_size=2, seq_length=size, shuffle=False, processor=processor, schema=schema
    )


def expected_pixels(processor, *files):
    images = [Image.open(file).convert("RGB") for file in files]
    return processor.image_processor(images=images, return_tensors="np")["pixel_values"]


@pytest.mark.parametrize("how", [{}, {"streaming": True}, {"prefetch_workers": 2}])
def test_batch_equals_output_of_the_processor(mixture, jsonl, processor, pictures, how):
    rows = [chat(i, 1 + i % 2) for i in range(4)]
    batch = next(loader_of(mixture, jsonl, processor, rows, **how))
    assert batch["pixel_values"].shape == (2, 2, 3, 28, 28)
    assert batch["pixel_values"].dtype == np.float32
    for number, row in enumerate(rows[:2]):
        files = [pictures / name for name in row["images"]]
        output = processor.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=False
        )
        whole = processor(
            text=output,
            images=[Image.open(file).convert("RGB") for file in files],
            return_tensors="np",
            add_special_tokens=False,
        )
        used = batch["segment_ids"][number] > 0
        assert batch["input_ids"][number][used].tolist() == whole["input_ids"][0].tolist()
        assert np.array_equal(batch["pixel_values"][number][: len(files)], whole["pixel_values"])
        assert not batch["pixel_values"][number][len(files) :].any()
        placeholders = batch["input_ids"][number] == processor.image_token_id
        assert placeholders.sum() == FEATURES * len(files)
        assert (batch["labels"][number][placeholders] == -100).all()


def test_assistant_only_loss_covers_the_answer_after_images(mixture, jsonl, processor, pictures):
    options = {"tokenization": {"assistant_only_loss": True}}
    batch = loader_of(mixture, jsonl, processor, [chat(1)], **options).batch_at(0)
    learned = batch["labels"][0][batch["labels"][0] >= 0]
    assert processor.tokenizer.decode(learned) == "answer 1<|eos|>"


def test_packed_rows_keep_the_images_of_their_documents_in_order(
    mixture, jsonl, processor, pictures
):
    rows = [chat(i, 1 + i % 3) for i in range(8)]
    loader = loader_of(
        mixture, jsonl, processor, rows, pack_tokens=True, pack_seq_length=160, pack_shuffle=False
    )
    seen = 0
    for step in range(loader.steps_per_epoch):
        batch = loader.batch_at(step)
        token = processor.image_token_id
        for ids, segments, pixels in zip(
            batch["input_ids"], batch["segment_ids"], batch["pixel_values"], strict=True
        ):
            files = []
            for segment in range(1, segments.max() + 1):
                text = processor.tokenizer.decode(ids[segments == segment])
                row = rows[int(text.split("question ")[1].split("?")[0])]
                files += [pictures / name for name in row["images"]]
                seen += 1
            assert (ids == token).sum() == FEATURES * len(files)
            assert np.array_equal(pixels[: len(files)], expected_pixels(processor, *files))
            assert not pixels[len(files) :].any()
    assert seen >= 6
    assert loader.batch_at(0)["segment_ids"].max() > 1


def test_hosts_create_pixel_values_of_equal_shape(mixture, jsonl, processor, pictures):
    rows = [chat(0, 3), {"messages": [user("no image", 0)], "images": None}]
    loader = loader_of(mixture, jsonl, processor, rows)
    whole = loader.batch_at(0)["pixel_values"]
    parts = [loader.for_rows([row]).batch_at(0)["pixel_values"] for row in range(2)]
    assert whole.shape == (2, 3, 3, 28, 28)
    assert np.array_equal(np.concatenate(parts), whole)


def test_batch_without_images_has_one_empty_image(mixture, jsonl, processor):
    rows = [{"messages": [{"role": "user", "content": "text"}]}]
    batch = loader_of(mixture, jsonl, processor, rows).batch_at(0)
    assert batch["pixel_values"].shape == (2, 1, 3, 28, 28)
    assert not batch["pixel_values"].any()


def test_image_parts_may_contain_the_image(mixture, jsonl, processor, pictures):
    url = "data:image/png;base64," + base64.b64encode(png(60)).decode()
    (pictures / "same.png").write_bytes(png(60))
    parts = [
        {"type": "image", "path": "same.png"},
        {"type": "image", "url": f"file://{pictures}/same.png"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": str(pictures / "same.png")},
        {"type": "text", "text": "four"},
    ]
    rows = [{"messages": [{"role": "user", "content": parts}]}]
    batch = loader_of(mixture, jsonl, processor, rows).batch_at(0)
    expected = expected_pixels(processor, pictures / "same.png")[0]
    assert batch["pixel_values"].shape[1] == 4
    assert all(np.array_equal(pixels, expected) for pixels in batch["pixel_values"][0])


def test_images_of_a_table_are_bytes(tmp_path, mixture, processor):
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = {"bytes": png(7), "path": None}
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "table"}]
    rows = [{"messages": [{"role": "user", "content": parts}], "images": [image]}] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    inform = {"data_files": str(tmp_path / "rows.parquet"), "content_field": "messages"}
    made = mixture(informs=[inform], pack_tokens=False)
    batch = build_loader(
        made, batch_size=2, seq_length=64, processor=processor, shuffle=False
    ).batch_at(0)
    (tmp_path / "x.png").write_bytes(png(7))
    expected = expected_pixels(processor, tmp_path / "x.png")[0]
    assert np.array_equal(batch["pixel_values"][:, 0], np.stack([expected, expected]))


def test_prompt_and_completion_may_have_images(mixture, jsonl, processor, pictures):
    row = {"prompt": [user("answer yes")], "completion": [{"role": "assistant", "content": "yes"}]}
    rows = [{**row, "images": ["2.png"]}]
    batch = loader_of(mixture, jsonl, processor, rows, COMPLETION).batch_at(0)
    learned = batch["labels"][0][batch["labels"][0] >= 0]
    assert processor.tokenizer.decode(learned) == "yes<|eos|>"
    assert (batch["input_ids"][0] == processor.image_token_id).sum() == FEATURES
    assert np.array_equal(batch["pixel_values"][0], expected_pixels(processor, pictures / "2.png"))


def test_visual_rows_have_their_placeholders_in_the_text(mixture, jsonl, processor, pictures):
    rows = [{"file": "3.png", "caption": "<image>a picture"}]
    inform = {"type": "visual", "image_field": "file", "text_field": "caption"}
    path = jsonl(rows)
    made = mixture(informs=[{"data_files": path, **inform}], pack_tokens=False)
    batch = build_loader(made, seq_length=32, processor=processor).batch_at(0)
    assert (batch["input_ids"][0] == processor.image_token_id).sum() == FEATURES
    assert np.array_equal(batch["pixel_values"][0], expected_pixels(processor, pictures / "3.png"))


ANSWER = {"role": "assistant", "content": "a picture"}
SYSTEM = {"role": "system", "content": "be brief"}


def plain(text: str = "what?") -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("schema", "row", "text"),
    [
        (TEXT, {"caption": "a picture"}, "<|bos|>{images}a picture<|eos|>"),
        (TEXT, {"caption": "a {token} picture"}, "<|bos|>a {images} picture<|eos|>"),
        (
            TEXT,
            {"caption": [SYSTEM, plain(), ANSWER, plain()]},
            "system:be briefuser:{images}what?assistant:a picture<|eos|>user:what?",
        ),
        (
            TEXT,
            {"caption": [plain("see {token}!"), ANSWER]},
            "user:see {images}!assistant:a picture<|eos|>",
        ),
        (
            TEXT,
            {"caption": [{"role": "user", "content": [{"type": "text", "text": "what?"}]}, ANSWER]},
            "user:{images}what?assistant:a picture<|eos|>",
        ),
        (
            COMPLETION,
            {"caption": "what? ", "completion": "a picture"},
            "<|bos|>{images}what? a picture<|eos|>",
        ),
        (COMPLETION, {"caption": "", "completion": "a picture"}, "<|bos|>{images}a picture<|eos|>"),
        (
            COMPLETION,
            {"caption": [plain()], "completion": [ANSWER]},
            "user:{images}what?assistant:a picture<|eos|>",
        ),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_images_without_a_placeholder_stand_before_the_text(
    mixture, jsonl, processor, pictures, schema, row, text, count
):
    row = json.loads(json.dumps(row).replace("{token}", "<image>" * count))
    files = [f"{number + 3}.png" for number in range(count)]
    inform = {"type": "visual", "image_field": "file", "text_field": "caption"}
    path = jsonl([{**row, "file": files if count > 1 else files[0]}])
    made = mixture(informs=[{"data_files": path, **inform}], pack_tokens=False)
    batch = build_loader(made, seq_length=96, processor=processor, schema=schema).batch_at(0)
    used = batch["segment_ids"][0] > 0
    images = "<image>" * FEATURES * count
    assert processor.tokenizer.decode(batch["input_ids"][0][used]) == text.format(images=images)
    expected = expected_pixels(processor, *(pictures / name for name in files))
    assert np.array_equal(batch["pixel_values"][0], expected)
    placeholders = batch["input_ids"][0] == processor.image_token_id
    assert (batch["labels"][0][placeholders] == -100).all()


def test_images_of_a_chat_without_image_parts_stand_before_its_first_question(
    mixture, jsonl, tokenizer, processor, pictures
):
    rows = [{"messages": [plain(), ANSWER], "images": ["4.png"]}]
    batch = loader_of(mixture, jsonl, processor, rows).batch_at(0)
    used = batch["segment_ids"][0] > 0
    text = f"user:{'<image>' * FEATURES}what?assistant:a picture<|eos|>"
    assert processor.tokenizer.decode(batch["input_ids"][0][used]) == text
    assert np.array_equal(batch["pixel_values"][0], expected_pixels(processor, pictures / "4.png"))
    # A model of texts reads the chat, as before.
    made = mixture(
        informs=[{"data_files": jsonl(rows), "content_field": "messages"}], pack_tokens=False
    )
    batch = build_loader(made, processor.tokenizer, seq_length=32).batch_at(0)
    assert "user:what?" in processor.tokenizer.decode(batch["input_ids"][0])


@pytest.mark.parametrize("how", [{}, {"streaming": True}])
def test_resumed_loader_creates_the_same_images(mixture, jsonl, processor, pictures, how):
    rows = [chat(i, 1 + i % 2) for i in range(8)]
    loader = loader_of(mixture, jsonl, processor, rows, **how)
    for _ in range(2):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    again = loader_of(mixture, jsonl, processor, rows, **how)
    again.load_state_dict(state)
    first, second = next(loader), next(again)
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.nightly
def test_worker_processes_expand_placeholders(mixture, jsonl, processor, pictures):
    rows = [chat(i) for i in range(4)]
    alone = loader_of(mixture, jsonl, processor, rows)
    options = {"num_proc": 1, "batch_size": 2}
    parallel = loader_of(mixture, jsonl, processor, rows, tokenization=options)
    first, second = alone.batch_at(0), parallel.batch_at(0)
    parallel.close()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_truncation_never_removes_a_placeholder(mixture, jsonl, processor, pictures):
    late = {"role": "user", "content": [{"type": "text", "text": "x" * 90}, {"type": "image"}]}
    rows = [chat(0), {"messages": [late], "images": ["1.png"]}, chat(2)]
    with pytest.raises(DataError, match=r"data\.jsonl:2: the row has \d+ tokens, and truncation"):
        loader_of(mixture, jsonl, processor, rows)
    skipping = loader_of(mixture, jsonl, processor, rows, inform={"on_error": "skip"})
    batch = skipping.batch_at(0)
    found = (batch["input_ids"] == processor.image_token_id).sum(axis=1)
    assert found.tolist() == [FEATURES, FEATURES]
    texts = processor.tokenizer.batch_decode(batch["input_ids"])
    assert ["question 0?" in texts[0], "question 2?" in texts[1]] == [True, True]


def test_text_after_the_images_may_be_truncated(mixture, jsonl, processor, pictures):
    batch = loader_of(
        mixture, jsonl, processor, [{**chat(0), "messages": [user("long " * 60)]}]
    ).batch_at(0)
    assert (batch["segment_ids"][0] > 0).all()
    assert (batch["input_ids"][0] == processor.image_token_id).sum() == FEATURES


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**chat(0), "images": []}, r":1: image part 1 of the messages has no image"),
        ({**chat(0), "images": ["0.png", "1.png"]}, r":1: the row has 2 images in 'images', but 1"),
        ({**chat(0), "images": ["none.png"]}, r":1: there is no image 'none\.png'"),
        ({**chat(0), "images": ["data.jsonl"]}, r":1, image 1 of 1: the image cannot be decoded"),
        ({**chat(0), "images": [5]}, r":1: 'images' must be an image: .*got int 5"),
        (
            {"messages": [{"role": "user", "content": "<image>"}]},
            r":1: the row has 0 images, but its tokens contain the image token '<image>' 1 times",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "data:,?"}]}]},
            r":1: an image part has an invalid data URL",
        ),
    ],
)
def test_errors_of_images_name_file_and_row(mixture, jsonl, processor, pictures, row, says):
    with pytest.raises(DataError, match=rf"data\.jsonl{says}"):
        loader_of(mixture, jsonl, processor, [row]).batch_at(0)


def test_chats_with_images_require_a_processor(mixture, jsonl, tokenizer, processor, pictures):
    made = mixture(
        informs=[{"data_files": jsonl([chat(0)]), "content_field": "messages"}], pack_tokens=False
    )
    with pytest.raises(DataError, match=r"data\.jsonl:1: the messages contain images: pass the"):
        build_loader(made, processor.tokenizer, seq_length=64)


def test_unsupported_combinations_with_images_are_refused(mixture, jsonl, processor, tokenizer):
    rows = [{"anchor": "a", "positive": "b"}]
    with pytest.raises(DataError, match="documents with one sequence of tokens"):
        loader_of(mixture, jsonl, processor, rows, EMBEDDING)
    with pytest.raises(DataError, match="documents with images are never split"):
        loader_of(
            mixture,
            jsonl,
            processor,
            [chat(0)],
            pack_tokens=True,
            pack_seq_length=64,
            pack_strategy="wrapped",
        )
    with pytest.raises(DataError, match="is not a processor of images and text"):
        build_loader(
            mixture(["a"], pack_tokens=False), tokenizer, seq_length=8, processor=tokenizer
        )


def test_prompts_of_rollouts_contain_the_images(mixture, jsonl, tokenizer, pictures):
    rows = [{"prompt": [user("look", 2)], "images": ["0.png", "1.png"]}]
    found = list(documents(Inform(data_files=jsonl(rows), content_field="prompt")))
    assert found[0].image == [str(pictures / "0.png"), str(pictures / "1.png")]
    made = mixture(informs=[{"data_files": jsonl([{"prompt": "hi"}])}])
    assert "image" not in build_prompts(made, tokenizer, batch_size=1).batch_at(0).fields


@pytest.mark.parametrize("parts", [1, 0])
def test_pairs_without_a_prompt_have_the_images_of_their_prompt(jsonl, pictures, parts):
    turns = {
        side: [user("look", parts), {"role": "assistant", "content": side}]
        for side in ("chosen", "rejected")
    }
    whole = jsonl([{**turns, "images": ["0.png"]}])
    prompt = {"prompt": turns["chosen"][:1], "images": ["0.png"]}
    split = jsonl([{**prompt, **{side: chat[1:] for side, chat in turns.items()}}], "split.jsonl")
    for schema in (PREFERENCE, PROMPT, LABELLED):
        pairs, rows = (documents(Inform(data_files=p), schema=schema) for p in (whole, split))
        for pair, row in zip(pairs, rows, strict=True):
            assert pair.fields == row.fields
            assert pair.image == row.image == str(pictures / "0.png")
