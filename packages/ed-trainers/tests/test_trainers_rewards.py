"""Reward functions: how they are found and called, what goes wrong with them, and the rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers.online.completions import Completions
from ed_trainers.online.scorer import Scores
from ed_trainers.options.groups import RLVRArguments
from ed_trainers.rewards import RewardError, Rewards, list_fields
from ed_trainers.rewards.rules import RULES, last_number, parse_number, stated_answer
from online_runs import words
from pydantic import ValidationError


def some(completions, **fields):
    count = len(completions)
    return Completions(
        prompts=[f"prompt {i // 2}" for i in range(count)],
        prompt_ids=[[1]] * count,
        completion_ids=[[i + 1, 2] for i in range(count)],
        logprobs=[[0.0, 0.0]] * count,
        completions=list(completions),
        ended=[True] * count,
        fields=fields,
    )


def takes_all(**everything):
    assert {"prompts", "completions", "completion_ids", "answer"} == {*everything}
    return [None, *[1] * (len(everything["answer"]) - 1)]


def fails(completions):
    raise ZeroDivisionError("no tests ran")


def test_reward_functions_have_unique_names_and_receive_named_fields():
    here = "online_runs:words"
    rewards = Rewards([here, {here: {"bonus": 0.5}}, "exact", takes_all])
    assert rewards.names == ("words_1", "words_2", "exact", "takes_all")
    each = rewards(some(["one two", "4"], answer=["4", "4"]))
    np.testing.assert_array_equal(each, [[2, 2.5, 0, math.nan], [1, 1.5, 1, 1]])


def test_function_of_one_completion_is_called_for_each():
    def score(completion, answer, prompt, bonus=0.0):
        return float(completion.endswith(answer)) + bonus if prompt == "prompt 0" else None

    def guess(completion, **fields):
        return len(completion) + len(fields)

    columns = some(["it is 4", "5", "4"], answer=["4", "4", "4"])
    each = Rewards([score, guess])(columns)
    np.testing.assert_array_equal(each, [[1, 10], [0, 4], [math.nan, 4]])
    assert list_fields(score) == ("answer",)
    with pytest.raises(ConfigError, match="'score' requires 'answer'"):
        Rewards([score])(some(["4"]))


def test_an_entry_point_gives_a_function(monkeypatch):
    from ed_trainers import rewards as module

    class Point:
        name = "of_a_package"

        def load(self):
            return words

    monkeypatch.setattr(module, "entry_points", lambda group: [Point()])
    assert Rewards(["of_a_package"])(some(["a b c"])).tolist() == [[3]]
    with pytest.raises(ConfigError, match="did you mean 'of_a_package'"):
        Rewards(["of_a_packag"])


def test_unknown_reward_functions_raise_config_error():
    for entry, said in [
        ("exactt", "did you mean 'exact'"),
        ("no_such_module:f", "cannot be imported: there is no module .* or module:function"),
        ("online_runs:nothing", "cannot be imported"),
        ({"regex": {"patern": "x"}}, "did you mean 'pattern'"),
        ({"online_runs:words": {"bonuss": 1}}, "did you mean 'bonus'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Rewards([entry])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fails, r"'fails' raised ZeroDivisionError: no tests ran; .* 4 completions, row 0 \('pro"),
        (lambda completions: [1.0], "gave 1 values for 4 completions: it must return one for each"),
        (lambda completions: [1, math.nan, 0, math.inf], r"gave nan for row 1 .*, 3 \('prompt 1'"),
        (lambda completions: [1, "good", 0, 1], r"gave 'good' for row 1 \('prompt 0'\)"),
        (lambda completions: None, "raised TypeError"),
    ],
)
def test_a_function_that_goes_wrong_is_named_with_its_rows(function, said):
    with pytest.raises(RewardError, match=said):
        Rewards([function])(some(["a"] * 4))


def test_a_field_that_the_rows_do_not_bring():
    def by_tests(completions, tests):
        return [1.0] * len(completions)

    with pytest.raises(ConfigError, match=r"'by_tests' requires 'tests'.*additional_fields"):
        Rewards([by_tests])(some(["a"], answer=["b"]))
    with pytest.raises(RewardError, match="no field 'answer'"):
        Rewards(["exact"])(some(["a"], solution=["b"]))
    assert Rewards([{"exact": {"field": "solution"}}])(some(["b "], solution=["b"])) == [[1]]


def test_where_no_function_applies_a_completion_has_no_reward():
    each = np.array([[1, math.nan], [math.nan, math.nan], [0, 2]], np.float32)
    figures = Scores(each, np.array([1, math.nan, 2], np.float32), ("a", "b")).figures()
    assert figures["rewards/a/mean"] == 0.5 and figures["rewards/b/mean"] == 2
    assert figures["reward_std"] == pytest.approx(math.sqrt(0.5))


def check(rule, text, answer=None, **settings):
    return RULES[rule]([text], answer=[answer], **settings)[0]


def test_reward_rules_score_completions():
    assert check("exact", " Paris\n", "Paris") == 1 and check("exact", "paris", "Paris") == 0
    assert check("exact", "paris", "Paris", ignore_case=True) == 1
    assert check("exact", "anything", None) is None
    assert check("number", "2 + 2 = 4, so 1,024.0", "1024") == 1
    assert check("number", "about 3.14", math.pi) == 0
    assert check("number", "about 3.14", math.pi, tolerance=0.01) == 1
    assert check("number", "none", "4") == 0
    assert check("regex", "a\nyes", pattern="a.yes$") == 1
    assert check("regex", "no", pattern="^yes") == 0
    assert check("format", "<think>a\nb</think>\n<answer>4</answer>\n") == 1
    assert check("format", "<answer>4</answer>") == 0
    assert check("format", "42", pattern=r"\d+") == 1 and check("format", "x42", pattern="4") == 0
    chat = [{"role": "assistant", "content": "4"}]
    assert RULES["exact"]([chat], answer=["4"]) == [1]
    with pytest.raises(TypeError, match="processing_class"):
        RULES["exact"]([[3, 4]], answer=["4"])


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{3} or rather \boxed{\dfrac{2}{3}}", r"\frac{4}{6}", 1),
        ("3 apples and 4 pears.\n#### 7", "#### 7", 1),
        ("<think>9</think><answer> 12 </answer>", "12", 1),
        ("The answer is 1,200.", "1200", 1),
        ("I count 5, then 6", "6", 1),
        (r"\boxed{50\%}", "1/2", 1),
        (r"\boxed{\$2.50}", "2.5", 1),
        (r"\boxed{x + 1}", "x+1", 1),
        (r"\boxed{\text{Monday}}", "monday", 1),
        (r"\boxed{\sqrt{2}}", "1.414", 0),
        (r"\boxed{1/0}", "0", 0),
        ("no idea", "3", 0),
        ("the answer is 8", "9", 0),
        ("9" * 300, "9", 0),
    ],
)
def test_math_answer_rule_compares_values(text, answer, right):
    assert check("math_answer", text, answer) == right


def test_answer_parsers_return_none_without_a_value():
    assert last_number("-3 and +1.5e3") == 1500
    assert (
        last_number("x") is None and parse_number("three") is None and parse_number("1/2/3") is None
    )
    assert stated_answer(r"\boxed{open") is None


def test_length_falls_linearly_from_its_target():
    completions = ["a" * n for n in (0, 9, 10, 50, 100, 150, 250, 301)]
    given = {"target": 100, "shortest": 10, "longest": 300}
    expected = [0, 0, 0.1, 0.5, 1, 0.5, 0, 0]
    assert RULES["length"](completions, **given) == pytest.approx(expected)
    for settings, said in [({}, "needs target"), ({"target": 0}, "greater than or equal to 1")]:
        with pytest.raises(ConfigError, match=said):
            Rewards([{"length": settings}])


def test_keys_of_rlvr_are_rules_with_weights():
    given = {"format_pattern": "x+", "format_reward_weight": 0.2, "answer_key": "gold"}
    given["batch_unit"] = "completions"
    length = {"length_penalty_target": 100, "length_penalty_weight": 0.5}
    options = RLVRArguments(**given, **length)
    assert options.reward_weights == (1.0, 0.2, 0.5)
    rewards = Rewards(options.reward_functions)
    assert rewards.names == ("math_answer", "regex", "length")
    each = rewards(some(["xx 4", "x" * 100], gold=["4", "5"]))
    np.testing.assert_array_equal(each, [[1, 1, 0], [0, 1, 1]])
    assert options.replace(beta=0.5).reward_functions == options.reward_functions
    assert RLVRArguments(length_penalty_target=9, batch_unit="prompts").reward_weights is None, (
        "the weight is 0"
    )
    for wrong, said in [
        ({**length, "reward_functions": "exact"}, "keep reward_functions"),
        ({**length, "length_penalty_weight": -1}, "at least 0"),
        ({**length, "length_penalty_target": "far"}, "whole number"),
    ]:
        with pytest.raises(ValidationError, match=said):
            RLVRArguments(**wrong)
