"""The configuration fields read from source equal those of the classes of transformers."""

from __future__ import annotations

import dataclasses

import pytest
from ed_elarge.config import architectures
from ed_elarge.config.config_source import config_fields, inner_types
from ed_infra.enums import ACTIVATION_NAMES
from ed_layers import activations


@pytest.fixture(scope="module")
def classes() -> dict[str, type]:
    from transformers import CONFIG_MAPPING

    return {n: CONFIG_MAPPING[n] for n in architectures.list_architectures() if n in CONFIG_MAPPING}


def test_fields_in_source_are_the_fields_of_the_classes(classes) -> None:
    assert len(classes) > 70
    for model_type, cls in classes.items():
        fields = config_fields(model_type)
        assert fields is not None, model_type
        names = {field.name for field in dataclasses.fields(cls)} - {"transformers_version"}
        assert set(fields) == names, model_type


def test_defaults_in_source_are_the_defaults_of_the_classes(classes) -> None:
    for model_type, cls in classes.items():
        fields = config_fields(model_type) or {}
        for field in dataclasses.fields(cls):
            if field.name in fields and field.default is not dataclasses.MISSING:
                assert fields[field.name].default == field.default, (model_type, field.name)


def test_every_field_of_an_architecture_has_a_type(classes) -> None:
    untyped = {
        (model_type, name)
        for model_type in classes
        for name, field in (config_fields(model_type) or {}).items()
        if not field.types
    }
    assert not untyped


def test_default_configuration_of_every_class_passes_the_check(classes) -> None:
    for model_type in classes:
        values = {k: f.default for k, f in (config_fields(model_type) or {}).items()}
        given = {k: v for k, v in values.items() if v is not None and k != "hidden_act"}
        listed = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}
        assert architectures.check_values(listed, model_type) == {}, model_type


def test_activation_names_are_the_implemented_activations() -> None:
    assert set(ACTIVATION_NAMES) == set(activations.ACTIVATIONS)


def test_older_rope_fields_pass_architecture_check() -> None:
    config = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}
    assert architectures.check_fields(config, ()) == []


def test_unknown_key_in_nested_configuration_is_located(monkeypatch) -> None:
    monkeypatch.setattr(architectures, "list_architectures", lambda: ("llava",))
    inner = {"model_type": "llama", "hidden_sise": 8}
    (problem,) = architectures.check_fields({"model_type": "llava", "text_config": inner}, ())
    assert problem.path == ("text_config", "hidden_sise")
    assert problem.message == "unknown key 'hidden_sise'; did you mean 'hidden_size'?"


def test_nested_configuration_without_model_type_has_the_type_of_its_class(monkeypatch) -> None:
    monkeypatch.setattr(architectures, "list_architectures", lambda: ("clip",))
    found = {"text_config": "clip_text_model", "vision_config": "clip_vision_model"}
    assert inner_types("clip") == found
    assert inner_types("gemma3")["vision_config"] == "siglip_vision_model"
    (problem,) = architectures.check_fields(
        {"model_type": "clip", "vision_config": {"patch_sise": 8}}, ()
    )
    assert problem.path == ("vision_config", "patch_sise")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_dim", [512, 0]),
        ("conv_dim", []),
        ("ctc_loss_reduction", "max"),
        ("mask_time_length", 0),
    ],
)
def test_wrong_value_of_a_list_or_choice_is_refused(key: str, value: object) -> None:
    assert key in architectures.check_values({key: value}, "wav2vec2")
