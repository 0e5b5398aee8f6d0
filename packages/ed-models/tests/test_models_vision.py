"""Models of images: resized positions, other image sizes, masked patches, new heads, errors."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, RegistryError
from ed_infra.inputs import SIZES
from ed_models.auto import AutoEasyDeLModel, AutoEasyDeLModelForImageClassification
from ed_models.body.resizing import resized_grid
from ed_models.checkpoints.checks import detect_task
from ed_models.modalities.images import split_images
from ed_models.tasks.conditional import ConditionalLM, _is_processor_form
from flax import nnx

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}
ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
#: Vision tower of transformers, and whether it takes `interpolate_pos_encoding`.
TOWERS = {
    "ViT": True,
    "DeiT": True,
    "Dinov2": False,
    "Dinov2WithRegisters": False,
    "CLIPVision": True,
    "SiglipVision": True,
}


@pytest.mark.torch
@pytest.mark.parametrize("size", [(5, 7), (2, 3), (9, 4)])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_resized_grid_equals_torch(method: Any, antialias: bool, size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    grid = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
    want = torch.nn.functional.interpolate(
        torch.tensor(grid).permute(2, 0, 1)[None],
        size=size,
        mode=method,
        align_corners=False,
        antialias=antialias,
    )
    found = resized_grid(grid, *size, method, antialias=antialias)
    np.testing.assert_allclose(found, want[0].permute(1, 2, 0).numpy(), atol=2e-6)


def written(folder: Path, name: str, kind: str = "Model", **fields: Any) -> Any:
    """Save a tiny model of transformers with large positions, and return the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    tiny = {**TINY, "mlp_ratio": 2} if name.startswith("Dinov2") else TINY
    config = getattr(transformers, f"{name}Config")(**tiny, **fields)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if "position" in parameter or "token" in parameter:
                value.normal_(0, 1)
    model.save_pretrained(folder)
    return model


def outputs(theirs: Any, ours: Any, images: np.ndarray, **inputs: Any) -> tuple[Any, Any]:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        want = theirs(torch.tensor(images), **inputs).last_hidden_state.numpy()
    given = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    return ours(images, **given).last_hidden_state, want


@pytest.mark.torch
@pytest.mark.daily("ViT")
@pytest.mark.parametrize("name", TOWERS)
def test_images_of_other_sizes_have_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = written(tmp_path, name)
    ours = AutoEasyDeLModel.from_pretrained(tmp_path, **ONE)
    images = np.random.default_rng(0).normal(size=(2, 3, 20, 9)).astype(np.float32)
    inputs = {"interpolate_pos_encoding": True} if TOWERS[name] else {}
    found, want = outputs(theirs, ours, images, **inputs)
    np.testing.assert_allclose(found, want, atol=2e-5)
    if TOWERS[name]:
        with pytest.raises(ConfigError, match="images of 20 x 9, but image_size is 12 x 12"):
            ours(images)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("name", ["Dinov2", "Dinov2WithRegisters"])
def test_masked_patches_have_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    theirs = written(tmp_path, name)
    ours = AutoEasyDeLModel.from_pretrained(tmp_path, **ONE)
    images = np.random.default_rng(0).normal(size=(2, 3, 12, 12)).astype(np.float32)
    masked = torch.arange(18).reshape(2, 9) % 2 == 0
    found, want = outputs(theirs, ours, images, bool_masked_pos=masked)
    np.testing.assert_allclose(found, want, atol=2e-5)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("name", ["ViT", "Dinov2", "CLIP", "Siglip"])
def test_body_becomes_a_classifier_with_a_new_head(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if name in ("CLIP", "Siglip"):
        transformers = pytest.importorskip("transformers")
        text = {**TINY, "vocab_size": 32, "max_position_embeddings": 8}
        text = {n: x for n, x in text.items() if n not in ("image_size", "patch_size")}
        of = getattr(transformers, f"{name}Config")
        config = of(text_config=text, vision_config=TINY)
        getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path)
    else:
        written(tmp_path, name)
    model = AutoEasyDeLModelForImageClassification.from_pretrained(
        tmp_path, config_kwargs={"num_labels": 5}, **ONE
    )
    images = np.zeros((2, 3, 12, 12), np.float32)
    assert model(images).logits.shape == (2, 5)
    assert "classifier.weight" in caplog.text


@pytest.mark.torch
def test_checkpoint_names_its_task(tmp_path: Path) -> None:
    written(tmp_path, "ViT", "ForImageClassification", num_labels=3)
    assert detect_task(tmp_path) == TaskType.IMAGE_CLASSIFICATION


def test_tower_is_the_base_module_of_its_model_type() -> None:
    tower = registry.get_module(TaskType.BASE_VISION, "clip_vision_model")
    assert registry.get_module(TaskType.BASE_MODULE, "clip_vision_model") is tower
    with pytest.raises(RegistryError, match="unknown model type 'my_tower'"):
        registry.get_config("llava")(
            text_config={"model_type": "llama"}, vision_config={"model_type": "my_tower"}
        )


def test_images_of_a_processor_are_assigned_to_prompts_by_their_tokens():
    pixels = np.arange(3.0).reshape(3, 1, 1, 1)
    rows = split_images(pixels, np.array([4, 0, 8]))
    np.testing.assert_array_equal(rows[:, :, 0, 0, 0], [[0, 0], [0, 0], [1, 2]])
    for tokens in ([4, 4], [0, 0], [3, 3, 3, 1]):
        with pytest.raises(ConfigError, match="3 images, and the prompts have"):
            split_images(pixels, np.array(tokens))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llava", "gemma3", "paligemma", "aya_vision"])
def test_generate_accepts_the_images_of_all_prompts_in_one_array(family):
    from tests.conformance.cases import subjects

    subject = subjects(family)[0]
    prompts = subject.prompts()
    pixels = np.asarray(prompts.pop("pixel_values"))
    tokens = (np.asarray(prompts["input_ids"]) == subject.model.config.image_token_id).sum(axis=1)
    filled = np.abs(pixels).reshape(*pixels.shape[:2], -1).max(axis=-1) > 0
    flat = pixels[filled]
    options = {**prompts, "max_new_tokens": 4, "eos_token_id": []}
    expected = subject.model.generate(**options, pixel_values=pixels).sequences
    assert tokens.any()
    assert flat.ndim == 4
    got = subject.model.generate(**options, pixel_values=flat).sequences
    np.testing.assert_array_equal(got, expected)
    inputs = subject.build_full_inputs()
    rows = subject.model(**inputs).logits
    calls = subject.model(**{**inputs, "pixel_values": jnp.asarray(flat)}).logits
    np.testing.assert_array_equal(calls, rows)


def test_call_converts_arrays_of_a_processor_unless_they_are_traced():
    """[i, c, h, w] and [p, f] hold the images of all rows; the tokens assign them to rows."""
    model = types.SimpleNamespace(batched_inputs=lambda ids, arrays: {"pixel_values": ids})
    ids = jnp.arange(6).reshape(2, 3)
    for pixels in (jnp.ones((3, 1, 4, 4)), jnp.ones((8, 5))):
        assert _is_processor_form({"pixel_values": pixels})
        rows = ConditionalLM._batch_media(model, ids, {"pixel_values": pixels})
        np.testing.assert_array_equal(rows["pixel_values"], ids)
    assert not _is_processor_form({"pixel_values": jnp.ones((2, 1, 1, 4, 4))})
    assert _is_processor_form({"pixel_values": jnp.ones((3, 1, 1, 4, 4)), SIZES: jnp.ones((3, 2))})

    def trace(tokens):
        return ConditionalLM._batch_media(model, tokens, {"pixel_values": jnp.ones((3, 1, 4, 4))})

    with pytest.raises(ConfigError, match=r"\[3, 1, 4, 4\].*model.batched_inputs"):
        jax.jit(trace)(ids)


def count_classes(module_class: type[Any]) -> int:
    """Return the number of classes of the longest chain below `nnx.Module`."""
    bases = [base for base in module_class.__bases__ if issubclass(base, nnx.Module)]
    return 0 if module_class is nnx.Module else 1 + max(map(count_classes, bases))


@pytest.mark.parametrize("model_type", ["llava", "llava_next", "qwen2_vl", "gemma4", "smolvlm"])
def test_five_classes_are_between_a_vision_language_family_and_nnx_module(model_type: str) -> None:
    module_class = registry.get_module(TaskType.IMAGE_TEXT_TO_TEXT, model_type)
    assert module_class.__bases__ == (ConditionalLM,)
    assert count_classes(module_class) - 1 <= 5
    assert count_classes(module_class.body_class) - 1 <= 5
