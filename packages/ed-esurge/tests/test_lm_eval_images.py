"""Tasks of lm-evaluation-harness with images: replies and scores of the torch backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch

from tests.image_checkpoints import save_checkpoint

pytest.importorskip("lm_eval")
Image = pytest.importorskip("PIL.Image")

TASK = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "<image> what {{word}} <image>?"
doc_to_image: !function pictures.images
doc_to_target: "{{word}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CODE = """
from PIL import Image

def images(row):
    return [Image.new("RGB", (30, 20), color) for color in row["colors"]]
"""


def picture(color: str) -> Any:
    return Image.new("RGB", (30, 20), color)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    save_checkpoint("gemma3", path)
    return path


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> Any:
    from ed_esurge.engine import eSurge
    from ed_esurge.lm_eval import eSurgeLM
    from ed_models.auto import AutoEasyDeLModelForImageTextToText
    from ed_models.checkpoints.tokenizers import load_processor

    model: Any = AutoEasyDeLModelForImageTextToText.from_pretrained(checkpoint)
    processor: Any = load_processor(str(checkpoint))
    engine = eSurge(
        model,
        processor.tokenizer,
        processor=processor,
        max_model_len=128,
        max_num_seqs=2,
        max_num_seq_buckets=(2,),
        page_size=16,
        compile_runner=False,
        silent_mode=True,
    )
    return eSurgeLM(engine, max_gen_toks=8)


@pytest.mark.nightly
@pytest.mark.torch
def test_replies_of_a_task_with_images_are_those_of_the_torch_backend(
    checkpoint: Path, adapter: Any, tmp_path: Path
) -> None:
    require_torch()
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.hf_vlms import HFMultimodalLM
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"word": "one", "colors": ["red", "blue"]}\n{"word": "two", "colors": ["blue", "lime"]}\n'
    )
    (tmp_path / "colors.yaml").write_text(TASK.replace("ROWS", str(rows)))
    (tmp_path / "pictures.py").write_text(CODE)
    theirs = HFMultimodalLM(
        str(checkpoint), image_string="<start>", device="cpu", dtype="float32", batch_size=1
    )
    for chat in (False, True):
        found = []
        for model in (adapter, theirs):
            results: Any = simple_evaluate(
                model=model,
                tasks=["colors"],
                task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
                log_samples=True,
                bootstrap_iters=0,
                apply_chat_template=chat,
            )
            samples = sorted(results["samples"]["colors"], key=lambda sample: sample["doc_id"])
            found.append([sample["resps"] for sample in samples])
        assert found[0] == found[1]


@pytest.mark.nightly
@pytest.mark.torch
def test_scores_of_answers_to_images_are_those_of_transformers(
    checkpoint: Path, adapter: Any
) -> None:
    torch = require_torch()
    import transformers

    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(checkpoint).eval()
    cases = [
        ("what <image>?", " red", ["red"]),
        ("<image> or <image>", " b c", ["blue", "lime"]),
        ("<image> or <image>", " b c", ["blue", "red"]),
    ]
    requests: list[Any] = []
    for text, answer, colors in cases:
        media = {"visual": [picture(color) for color in colors]}
        requests.append(SimpleNamespace(args=(text, answer, media)))
    processor = adapter.engine.processor
    scores = adapter.loglikelihood(requests)
    assert abs(scores[1][0] - scores[2][0]) > 1e-3, "the images have no effect"
    for request, (total, _) in zip(requests, scores, strict=True):
        text, answer, media = request.args
        text = text.replace("<image>", processor.boi_token)
        inputs = processor(text=text + answer, images=media["visual"], return_tensors="pt")
        ids = inputs["input_ids"][0]
        inputs.pop("attention_mask")
        with torch.no_grad():
            logps = torch.log_softmax(model(**inputs).logits[0], dim=-1)
        count = len(processor.tokenizer(answer, add_special_tokens=False)["input_ids"])
        wanted = sum(float(logps[at - 1, ids[at]]) for at in range(len(ids) - count, len(ids)))
        np.testing.assert_allclose(total, wanted, atol=1e-4)


def test_images_are_parts_of_messages_and_have_places_in_the_text() -> None:
    from ed_esurge.lm_eval_images import TaskImages

    processor = SimpleNamespace(
        image_token="[IMG]", tokenizer=SimpleNamespace(convert_tokens_to_ids=lambda token: 7)
    )
    images = TaskImages(("pixel_values",), processor)
    history = [{"role": "user", "content": "<image>a<image>"}, {"role": "user", "content": "b"}]
    image, text = {"type": "image"}, {"type": "text", "text": "a"}
    assert images.chat(history) == [{"role": "user", "content": [image, text, image]}, history[1]]
    assert images.prompt("a", [], lambda text: [len(text)]) == ([1], ())
    with pytest.raises(ConfigError, match="has 1 images, but its text has 2 places"):
        images.prompt("<image> [IMG]", [picture("red")], lambda text: [])
