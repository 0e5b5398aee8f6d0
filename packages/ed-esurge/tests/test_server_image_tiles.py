"""Chat requests with images of all forms: tiles, packed patches, tokens that attend to others."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.server.launch import background
from ed_models.auto import AutoEasyDeLModelForImageTextToText

from tests.image_checkpoints import FAMILIES, save_checkpoint

Image = pytest.importorskip("PIL.Image")


class Served:
    """A tiny random checkpoint: its processor, its model, and an engine."""

    def __init__(self, name: str, path: Any) -> None:
        self.processor = save_checkpoint(name, path)
        self.model: Any = AutoEasyDeLModelForImageTextToText.from_pretrained(path)
        flags = "--max-model-len 256 --max-num-seqs 2 --max-num-seq-buckets 2 --page-size 16"
        flags += " --no-compile-runner --silent-mode --max-num-batched-tokens "
        # A step computes a prompt, or an image, together.
        flags += {"paligemma": "256", "gemma4": "260"}.get(name, "24")
        self.engine = create_engine(parse_model_arguments([str(path), *flags.split()]))

    def arrays(self, output: Any) -> dict[str, Any]:
        """Return the arrays of one row in the output of the processor."""
        if "image_grid_thw" in output:  # packed patches of all images
            return {name: np.asarray(output[name]) for name in ("pixel_values", "image_grid_thw")}
        if {"image_sizes", "image_position_ids"} & {*output}:  # padded tiles, or padded patches
            read = {*self.model.input_names, "batch_num_images"}
            return {name: x for name, x in output.items() if name in read}
        found = {name: np.asarray(output[name]) for name in self.model.modality.names}
        ranks = {"pixel_values": 5, "pixel_attention_mask": 4}
        return {name: x if x.ndim == ranks[name] else x[None] for name, x in found.items()}

    def expected(self, text: str, *images: Any) -> tuple[list[int], list[int]]:
        """Return the prompt and the tokens of `generate`, with the arrays of the processor."""
        options = self.processor._merge_kwargs(return_tensors="np")["images_kwargs"]
        arrays, texts = {}, []
        if images:
            output, texts = self.processor._process_images([[*images]], **options)
            arrays = self.arrays(output)
        first, *rest = text.split("IMAGE")
        whole = first + "".join(image + part for image, part in zip(texts, rest, strict=True))
        ids = self.processor.tokenizer(whole, add_special_tokens=False)["input_ids"]
        options = {"max_new_tokens": 8, "eos_token_id": []}
        out = self.model.generate(np.array([ids]), inputs=arrays, **options)
        return ids, out.sequences[0, len(ids) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory):
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def picture(seed: int, size: tuple[int, int]) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def part(image: Any) -> dict[str, Any]:
    data = io.BytesIO()
    image.save(data, "PNG")
    url = f"data:;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def reply(client: Any, model: str, *content: dict[str, Any]) -> tuple[list[int], list[int]]:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": [*content]}],
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.prompt_token_ids, answer.choices[0].token_ids


@pytest.mark.nightly
def test_replies_to_0_1_and_3_images_equal_generate(served):
    wide, high, square = picture(1, (90, 30)), picture(2, (20, 50)), picture(3, (28, 28))
    text = {"type": "text", "text": "\nand"}
    with background(served.engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        name = served.engine.model_name
        got = [
            reply(client, name, {"type": "text", "text": "what?"}),
            reply(client, name, part(wide), text),
            reply(client, name, part(wide), text, part(high), part(square)),
            reply(client, name, part(wide), text, part(square), part(high)),
        ]
    start, end = "<|user|>\n", "<|assistant|>"
    wanted = [
        served.expected(f"{start}what?{end}"),
        served.expected(f"{start}IMAGE\nand{end}", wide),
        served.expected(f"{start}IMAGE\nandIMAGEIMAGE{end}", wide, high, square),
        served.expected(f"{start}IMAGE\nandIMAGEIMAGE{end}", wide, square, high),
    ]
    assert got == wanted


@pytest.mark.nightly
def test_image_token_in_the_text_of_a_user_is_text(served):
    token = served.processor.image_token
    feature = served.processor.tokenizer.convert_ids_to_tokens(served.model.config.image_token_id)
    typed = {"type": "text", "text": f"{token} {feature}"}
    with background(served.engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        prompt, _ = reply(client, served.engine.model_name, typed, part(picture(4, (28, 28))))
    ids = served.processor.tokenizer.convert_tokens_to_ids([token, feature])
    expected = served.expected("IMAGE", picture(4, (28, 28)))[0]
    assert [prompt.count(i) for i in ids] == [expected.count(i) for i in ids]
    assert f"{token} {feature}" in served.processor.tokenizer.decode(prompt)
