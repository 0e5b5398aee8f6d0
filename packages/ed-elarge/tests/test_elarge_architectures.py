"""The table of Hugging Face config keys is what transformers has."""

from __future__ import annotations

from importlib import resources

from ed_elarge.config.checks import architectures

from tools.architectures import generate, render


def test_the_table_is_up_to_date() -> None:
    stored = resources.files("ed_elarge.config.checks").joinpath("architectures.json").read_text()
    assert stored == render(generate()), "run: uv run python -m tools.architectures"


def test_every_installed_family_with_a_hugging_face_class_has_a_table() -> None:
    assert "llama" in architectures.model_types()
    assert set(architectures.tables()) <= set(architectures.model_types())


def test_older_rope_fields_pass_architecture_check() -> None:
    config = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}
    assert architectures.check(config, ()) == {}
