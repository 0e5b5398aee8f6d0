"""The sources of the options of `generate`, and rejected values."""

import json
from types import SimpleNamespace

import pytest
from ed_infra.errors import ConfigError
from ed_models.generation.options import GenerationOptions
from ed_models.generation.token_choice import TokenChoice
from transformers import GenerationConfig

MODEL = SimpleNamespace(eos_token_id=2, pad_token_id=None, bos_token_id=1)


def resolve(generation_config=None, checkpoint=None, model_config=MODEL, **arguments):
    return GenerationOptions.resolve(
        arguments=arguments,
        generation_config=generation_config,
        checkpoint=checkpoint and json.dumps(checkpoint),
        model_config=model_config,
        prompt_length=10,
    )


def test_default_generation_options_are_resolved():
    options = resolve()
    assert options == GenerationOptions(128, (2,), 2, False, TokenChoice())


def test_arguments_win_over_the_configuration_and_that_over_the_checkpoint():
    config = GenerationConfig(max_new_tokens=7, eos_token_id=[4, 5], do_sample=True, top_k=3)
    checkpoint = {"eos_token_id": 9, "pad_token_id": 8, "do_sample": True, "temperature": 0.1}
    options = resolve(config, checkpoint, max_new_tokens=5)
    assert options.max_new_tokens == 5
    assert options.eos_token_id == (4, 5)
    assert (options.pad_token_id, options.pad_is_known) == (8, True)
    assert options.choice == TokenChoice(do_sample=True, top_k=3)


def test_the_checkpoint_does_not_switch_drawing_on():
    assert resolve(None, {"do_sample": True, "temperature": 0.6}).choice == TokenChoice()


def test_empty_eos_token_list_disables_end_of_sequence():
    assert resolve(None, {"eos_token_id": 9}, eos_token_id=[]).eos_token_id == ()


def test_sampling_options_do_not_change_greedy_program():
    config = {"temperature": 0.6, "top_p": 0.9}
    assert resolve(config).choice == TokenChoice()
    assert resolve({"top_k": 0, "do_sample": True}).choice.top_k is None


def test_max_length_counts_the_prompt():
    assert resolve({"max_length": 25}).max_new_tokens == 15
    with pytest.raises(ConfigError, match="which has 10 tokens already"):
        resolve({"max_length": 9})


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_an_option_without_effect_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} has no effect .* pass do_sample=True"):
        resolve(**{name: 1})


def test_unsupported_generation_options_raise_config_error():
    with pytest.raises(ConfigError, match=r"penalty_alpha=0.6, which generate does not support"):
        resolve(GenerationConfig(penalty_alpha=0.6))
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        resolve({"temprature": 0.3})
    with pytest.raises(ConfigError, match="or a mapping"):
        resolve(3)


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "8"])
def test_new_tokens_are_a_positive_number(count):
    with pytest.raises(ConfigError, match="max_new_tokens is"):
        resolve(max_new_tokens=count)


@pytest.mark.parametrize("length", [2.5, "25", False])
def test_max_length_is_a_number(length):
    with pytest.raises(ConfigError, match="max_length is"):
        resolve({"max_length": length})


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("token", [2.0, "</s>", [1, None], True])
def test_special_tokens_are_token_ids(name, token):
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be a token id, or several"):
        resolve(**{name: token})


def test_whether_to_draw_is_yes_or_no():
    with pytest.raises(ConfigError, match="do_sample is 'no'; it must be True or False"):
        resolve(do_sample="no")
