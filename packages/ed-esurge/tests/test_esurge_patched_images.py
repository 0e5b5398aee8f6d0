"""Images of different sizes in prompts: the engine produces the tokens of `generate`."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge.core.commands import EncoderInput
from ed_infra.errors import ConfigError
from image_requests import GREEDY, answers, engine_of

TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
#: Rotary positions of models of which half or a quarter of each head turns by default.
WHOLE_HEAD = {**TEXT["rope_parameters"], "partial_rotary_factor": 1.0}
VISION = {
    "depth": 2,
    "embed_dim": 24,
    "hidden_size": 32,
    "num_heads": 3,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "initializer_range": 0.5,
}
IMAGE, MERGE, NUMBERS = 156, 2, 12
#: A layer with a recurrent state, and one with pages.
HYBRID = {
    "head_dim": 8,
    "rope_parameters": WHOLE_HEAD,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


GLM_EXPERTS = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "rope_parameters": WHOLE_HEAD,
}


@pytest.fixture(scope="module")
def qwen():
    from ed_models.families.qwen2_vl import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=157,
        vision_start_token_id=158,
        vision_end_token_id=159,
        eos_token_id=2,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return Qwen2VLForConditionalGeneration.create(config, seed=3)


@pytest.fixture(scope="module")
def engine(qwen):
    return engine_of(qwen)


def prompt(seed: int, *images: tuple[int, int, int], names: tuple[int, ...] = ()):
    """Token ids, and the arrays and items of images.

    Args:
        images: place of each image, and its rows and columns of features.
        names: seeds of the pixels; by default they follow from `seed`.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 150, size=48).tolist()
    pixels, grids, items = [], [], []
    for number, (start, rows, columns) in enumerate(images):
        grid = np.array([1, rows * MERGE, columns * MERGE], np.int32)
        name = names[number] if names else seed * 10 + number
        values = np.random.default_rng(name).normal(size=(grid.prod(), NUMBERS))
        arrays = {"pixel_values": values.astype(np.float32), "image_grid_thw": grid}
        ids[start : start + rows * columns] = [IMAGE] * (rows * columns)
        items.append(EncoderInput.of(arrays, start, rows * columns))
        pixels.append(arrays["pixel_values"])
        grids.append(grid)
    given = {"pixel_values": np.concatenate(pixels), "image_grid_thw": np.stack(grids)}
    return ids, given if images else {}, items


def without_images(seed: int):
    return np.random.default_rng(seed).integers(3, 150, size=48).tolist(), {}, []


def expected(model, ids, arrays) -> list[int]:
    out = model.generate(np.array([ids]), max_new_tokens=10, eos_token_id=[], **arrays)
    return out.sequences[0, len(ids) :].tolist()


@pytest.mark.nightly
def test_prompt_with_two_images_produces_tokens_of_generate(qwen, engine):
    case = prompt(1, (2, 3, 4), (20, 2, 5))
    assert answers(engine, [case]) == [expected(qwen, *case[:2])]


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"use_aot_forward": False}])
def test_chunked_batched_and_preempted_images_produce_tokens_of_generate(qwen, options):
    cases = [
        prompt(1, (2, 3, 4), (20, 2, 5)),
        prompt(2, (5, 5, 6)),
        without_images(3),
        prompt(4, (1, 1, 1), (3, 6, 2), (30, 2, 2)),
    ]
    wanted = [expected(qwen, *case[:2]) for case in cases]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    assert answers(engine_of(qwen, **options), cases) == wanted


@pytest.mark.nightly
def test_equal_text_with_another_image_shares_no_page_of_the_image(qwen, engine):
    case, other = prompt(5, (8, 3, 4)), prompt(5, (8, 3, 4), names=(77,))
    turned = prompt(5, (8, 4, 3), names=(50,))
    assert case[0] == turned[0] and case[2][0].key != turned[2][0].key
    outputs = []
    for ids, _, items in (case, case, other, turned):
        engine.add_request("a", ids, GREEDY, encoder_inputs=items)
        got, cached = [], 0
        while engine.has_unfinished_requests:
            for out in engine.step():
                got += out.outputs[0].token_ids
                cached = out.metrics.num_cached_tokens
        outputs.append((got, cached))
    assert [got for got, _ in outputs] == [
        expected(qwen, *each[:2]) for each in (case, case, other, turned)
    ]
    assert [cached for _, cached in outputs] == [0, 40, 8, 8]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "vision"),
    [
        ("qwen2_5_vl", {"window_size": 8, "fullatt_block_indexes": [1]}),
        ("qwen3_vl", {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}),
        ("qwen3_vl_moe", {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
        ("glm4v", {"image_size": 8}),
        ("glm4v_moe", {"image_size": 8}),
        ("qwen3_5", {"num_position_embeddings": 16}),
        ("qwen3_5_moe", {"num_position_embeddings": 16}),
        ("exaone4_5", {"window_size": 8, "fullatt_block_indexes": [1], "num_key_value_heads": 1}),
    ],
)
def test_families_with_windows_and_further_features_produce_tokens_of_generate(model_type, vision):
    from ed_infra import registry
    from ed_infra.enums import TaskType

    sizes = {"hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32}
    own = {
        name: value for name, value in VISION.items() if name not in ("embed_dim", "hidden_size")
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    further = {
        "exaone4_5": {"model_type": "exaone4", "sliding_window_pattern": 2, "head_dim": 8},
        "glm4v_moe": {**GLM_EXPERTS, **experts},
        "qwen3_vl": {"head_dim": 8},
        "qwen3_vl_moe": {"head_dim": 8, **experts},
        "qwen3_5": HYBRID,
        "qwen3_5_moe": {**HYBRID, **experts, "shared_expert_intermediate_size": 16},
    }
    text = {**TEXT, **further.get(model_type, {})}
    config = registry.get_config(model_type)(
        text_config=text,
        vision_config={**own, **sizes, **vision},
        image_token_id=IMAGE,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = registry.get_module(TaskType.IMAGE_TEXT_TO_TEXT, model_type).create(config, seed=3)
    cases = [prompt(1, (2, 3, 4), (20, 2, 5)), prompt(2, (5, 5, 6)), without_images(3)]
    wanted = [expected(model, *case[:2]) for case in cases]
    assert answers(engine_of(model), cases) == wanted
    changed = prompt(1, (2, 3, 4), (20, 2, 5), names=(70, 71))
    assert expected(model, *changed[:2]) != wanted[0], "the images have no effect"


@pytest.mark.nightly
def test_saved_state_of_a_hybrid_model_is_not_used_after_another_image(monkeypatch):
    from ed_esurge.engine import setup
    from ed_models.families.qwen3_5_text import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    monkeypatch.setattr(setup, "STATE_SPACING", 8)
    monkeypatch.setattr(setup, "STATE_INTERVAL", 8)
    tower = {name: x for name, x in VISION.items() if name != "embed_dim"}
    sizes = {"hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32}
    config = Qwen3_5Config(
        text_config={**TEXT, **HYBRID},
        vision_config={**tower, **sizes, "num_position_embeddings": 16},
        image_token_id=IMAGE,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = Qwen3_5ForConditionalGeneration.create(config, seed=3)
    engine = engine_of(model, num_states=6)
    case, other = prompt(5, (8, 3, 4)), prompt(5, (8, 3, 4), names=(77,))
    cached = []
    for ids, arrays, items in (case, case, other, case):
        engine.add_request("a", ids, GREEDY, encoder_inputs=items)
        tokens = []
        while engine.has_unfinished_requests:
            for out in engine.step():
                tokens += out.outputs[0].token_ids
                hits = out.metrics.num_cached_tokens
        assert tokens == expected(model, ids, arrays)
        cached.append(hits)
    assert cached[0] == 0 and cached[1] > 20 and cached[2] <= 8 and cached[3] > 20


@pytest.mark.nightly
@pytest.mark.parametrize("ahead_of_time", [True, False])
def test_nothing_is_compiled_after_warm_up(qwen, ahead_of_time):
    engine = engine_of(qwen, compile_runner=True, use_aot_forward=ahead_of_time)
    before = engine.loop.runner.num_traces
    sizes = [(1, 1), (3, 4), (4, 5), (7, 6)]
    for seed, (rows, columns) in enumerate(sizes):
        case = prompt(seed, (2, rows, columns))
        assert answers(engine, [case]) == [expected(qwen, *case[:2])]
    assert engine.loop.runner.num_traces == before


def mixed(number: int):
    """Return a request: text, an image, three images, or the same image twice.

    Of 64 requests, 24 repeat the one before them.
    """
    seed = 100 + number * 5 // 8
    sizes = [(3, 4), (5, 2), (1, 1), (4, 4)]
    rows, columns = sizes[seed % 3]
    if seed % 4 == 0:
        return without_images(seed)
    if seed % 4 == 1:
        return prompt(seed, (seed % 7, rows, columns))
    if seed % 4 == 2:
        return prompt(seed, (1, 2, 2), (6, rows, columns), (30, 1, 3))
    return prompt(seed, (2, 3, 4), (20, 3, 4), names=(seed, seed))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 60},
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 240, "num_pages": 60},
    ],
    ids=["prefix hits", "preemption", "no prefix cache", "whole prompts"],
)
def test_64_mixed_requests_produce_tokens_of_generate_and_release_everything(qwen, options):
    cases = [mixed(number) for number in range(64)]
    wanted: list[list[int]] = []
    for number, case in enumerate(cases):
        repeats = number and case[0] == cases[number - 1][0]
        wanted.append(wanted[-1] if repeats else expected(qwen, *case[:2]))
    assert len({tuple(tokens) for tokens in wanted}) > 30
    engine = engine_of(qwen, compile_runner=True, **options)
    assert answers(engine, cases) == wanted
    stats, encoder = engine.stats(), engine.loop.scheduler.encoder
    assert stats["recompiles"] == 0
    assert (stats["num_preemptions"] > 0) == ("num_pages" not in options)
    if "num_pages" in options:
        assert stats["prefix_cache_hits"] > 0
    assert encoder is not None and encoder.hits > 0
    assert (stats["kv_cache_usage"], encoder.usage) == (0, 0)


@pytest.mark.nightly
def test_proposals_of_prompt_lookup_do_not_change_tokens_after_images(qwen):
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    engine = engine_of(qwen, speculative_config=speculative, num_pages=40)
    cases = [prompt(1, (2, 3, 4), (20, 2, 5)), prompt(2, (5, 5, 6))]
    assert answers(engine, cases) == [expected(qwen, *case[:2]) for case in cases]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, r"has 12 features, but the item has 11 placeholder tokens"),
        ({"grid": [1, 6, 7]}, r"pixel_values has shape \[48, 12\], and image_grid_thw is"),
        ({"missing": True}, "the item has no array image_grid_thw"),
    ],
)
@pytest.mark.nightly
def test_image_that_contradicts_its_placeholders_is_rejected(engine, change, message):
    ids, _, (item,) = prompt(6, (2, 3, 4))
    arrays = dict(item.arrays)
    if "grid" in change:
        arrays["image_grid_thw"] = np.array(change["grid"], np.int32)
    if "missing" in change:
        del arrays["image_grid_thw"]
    wrong = EncoderInput.of(arrays, item.start, change.get("length", item.length))
    with pytest.raises(ConfigError, match=message):
        engine.add_request("wrong", ids, GREEDY, encoder_inputs=[wrong])
