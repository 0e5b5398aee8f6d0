"""Chats with videos: their tokens, frames among packed patches, order, digests and errors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from ed_data import DataError, build_loader

from tests.image_processors import VIDEOS

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>"
    "{% elif part['type'] == 'video' %}<|video_pad|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


@pytest.fixture(scope="module", params=list(VIDEOS))
def processor(request, tokenizer):
    def with_tokens(image, *names, **special):
        own = pickle.loads(pickle.dumps(tokenizer))
        own.add_special_tokens({"additional_special_tokens": [image, *names]})
        own.chat_template = TEMPLATE
        return own

    return VIDEOS[request.param](with_tokens)


@pytest.fixture
def media(tmp_path):
    """Files `0.gif` to `2.gif` of 6, 8 and 10 frames at 2, 4 and 5 frames per second; `0.png`."""
    for number, milliseconds in enumerate((500, 250, 200)):
        frames = np.random.default_rng(number).integers(0, 255, (6 + 2 * number, 4, 5, 3), np.uint8)
        pictures = [Image.fromarray(frame).resize((40, 30)) for frame in frames]
        pictures[0].save(
            tmp_path / f"{number}.gif",
            save_all=True,
            append_images=pictures[1:],
            duration=milliseconds,
        )
    Image.new("RGB", (30, 20), (9, 90, 200)).save(tmp_path / "0.png")
    return tmp_path


def chat(kinds, **fields):
    parts = [{"type": kind} for kind in kinds]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
    return {"messages": [user, {"role": "assistant", "content": "a thing"}], **fields}


def build(mixture, jsonl, processor, rows, size=400, **options):
    inform = {"data_files": jsonl(rows), "content_field": "messages", **options.pop("inform", {})}
    made = mixture(informs=[inform], **{"pack_tokens": False, "seed": 0, **options})
    length = None if made.pack_tokens else size
    return build_loader(made, batch_size=1, seq_length=length, shuffle=False, processor=processor)


def read_gif(path):
    """Return the frames of a GIF, and its facts."""
    with Image.open(path) as picture:
        frames = []
        for number in range(picture.n_frames):
            picture.seek(number)
            frames.append(np.asarray(picture.convert("RGB")))
        fps = 1000 / picture.info["duration"]
    return np.stack(frames), {"total_num_frames": len(frames), "fps": fps}


def call_processor(processor, row, files, image=None):
    """Return the tokens and arrays of transformers' own call of the processor."""
    clips = [read_gif(file) for file in files]
    text = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    return processor(
        text=[text],
        images=None if image is None else [Image.open(image).convert("RGB")],
        videos=[frames for frames, _ in clips],
        video_metadata=[facts for _, facts in clips],
        do_sample_frames=True,
        add_special_tokens=False,
        fps=2,
        return_tensors="np",
    )


def test_batch_has_tokens_patches_and_times_of_the_processor(mixture, jsonl, processor, media):
    row = chat(["video", "image", "video"], videos=["0.gif", "2.gif"], images=["0.png"])
    batch = build(mixture, jsonl, processor, [row]).batch_at(0)
    expected = call_processor(processor, row, [media / "0.gif", media / "2.gif"], media / "0.png")
    ids = batch["input_ids"][0][batch["segment_ids"][0] > 0]
    assert ids[: len(expected["input_ids"][0])].tolist() == expected["input_ids"][0].tolist()
    videos, image = expected["video_grid_thw"], expected["image_grid_thw"][0]
    frames = [[[1, *grid[1:]]] * grid[0] for grid in videos.tolist()]
    grids = [*frames[0], image.tolist(), *frames[1]]
    assert batch["image_grid_thw"][0][: len(grids)].tolist() == grids
    assert not batch["image_grid_thw"][0][len(grids) :].any()
    first = int(videos[0].prod())
    patches = expected["pixel_values_videos"]
    pixels = np.concatenate([patches[:first], expected["pixel_values"], patches[first:]])
    assert np.array_equal(batch["pixel_values"][0, : len(pixels)], pixels)
    placeholders = np.isin(batch["input_ids"][0], [processor.video_token_id])
    assert (batch["labels"][0][placeholders] == -100).all()
    if processor.video_processor.whole:
        assert "image_times" not in batch
    else:
        seconds = expected["second_per_grid_ts"]
        assert len(seconds) == 2
        counts = videos[:, 0].tolist()
        times = [0, *range(2, counts[0] + 1), 0, 0, *range(2, counts[1] + 1)]
        assert batch["image_times"][0, : len(times)].tolist() == times


@pytest.mark.parametrize("how", ["url", "bytes", "frames", "column"])
def test_videos_in_parts_and_columns_have_the_same_arrays(mixture, jsonl, processor, media, how):
    path = str(media / "1.gif")
    if how == "frames":
        frames, _ = read_gif(path)
        for number, frame in enumerate(frames[:4]):
            Image.fromarray(frame).save(media / f"frame{number}.png")
        names = [f"frame{number}.png" for number in range(4)]
        batch = build(mixture, jsonl, processor, [chat(["video"], videos=[names])]).batch_at(0)
        assert (batch["image_grid_thw"][0].prod(axis=1) > 0).sum() == 2
        return
    expected = build(mixture, jsonl, processor, [chat(["video"], videos=["1.gif"])]).batch_at(0)
    row = chat(["video"])
    if how == "url":
        row["messages"][0]["content"][0] = {"type": "video_url", "video_url": {"url": path}}
    elif how == "bytes":
        import base64

        data = base64.b64encode((media / "1.gif").read_bytes()).decode()
        row["messages"][0]["content"][0] = {"type": "video", "base64": data}
    else:
        row = {**chat([]), "videos": ["1.gif"]}
    batch = build(mixture, jsonl, processor, [row]).batch_at(0)
    for name, array in expected.items():
        assert np.array_equal(batch[name], array), name


def test_packed_row_has_the_videos_of_its_chats(mixture, jsonl, processor, media):
    rows = [chat(["video"], videos=[f"{number}.gif"]) for number in range(3)]
    packing = {"pack_tokens": True, "pack_seq_length": 512, "pack_shuffle": False}
    batch = next(iter(build(mixture, jsonl, processor, rows, **packing)))
    singles = [build(mixture, jsonl, processor, [row]).batch_at(0) for row in rows]
    used = [single["image_grid_thw"][0].prod(axis=1) > 0 for single in singles]
    wanted = sorted(
        single["pixel_values"][0, : single["image_grid_thw"][0].prod(axis=1).sum()].tobytes()
        for single in singles
    )
    counts = batch["image_grid_thw"][0].prod(axis=1)
    assert (counts > 0).sum() == sum(int(here.sum()) for here in used)
    assert batch["segment_ids"].max() == 3
    assert sum(map(len, wanted)) == batch["pixel_values"][0, : counts.sum()].nbytes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat(["video"]), "video part 1 of the messages has no video"),
        (chat(["video"], videos=["0.gif", "1.gif"]), "1 of them have no video part"),
        (chat(["video"], videos=["none.gif"]), "none.gif"),
        (chat(["video"], videos=[3]), "a video must be a path"),
        (chat(["video"], videos=["0.txt"]), "the video cannot be read"),
    ],
)
def test_rows_with_wrong_videos_name_file_and_row(mixture, jsonl, processor, media, row, message):
    (media / "0.txt").write_bytes(b"GIF89a nothing")
    with pytest.raises(DataError, match=rf"(?s)data\.jsonl:1.*{message}"):
        build(mixture, jsonl, processor, [row]).batch_at(0)


def test_truncation_of_a_video_is_an_error(mixture, jsonl, processor, media):
    with pytest.raises(DataError, match="would remove image tokens"):
        build(mixture, jsonl, processor, [chat(["video"], videos=["2.gif"])], size=20)
