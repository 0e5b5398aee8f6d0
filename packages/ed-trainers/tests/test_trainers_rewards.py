"""Reward functions: how they are found and called, what goes wrong with them, and the rules."""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from ed_infra.errors import ConfigError, EasyDeLError
from ed_trainers.online.completions import Completions
from ed_trainers.online.scorer import Scores
from ed_trainers.options.groups import RLVRArguments
from ed_trainers.rewards import RewardError, Rewards, list_fields
from ed_trainers.rewards.programs import ProgramTest, extract_program, read_program_tests
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


def test_penalties_of_length_and_repetition_are_those_of_their_papers():
    ids = [[1] * n for n in (10, 80, 90, 100, 500)]
    texts = [""] * len(ids)
    penalties = RULES["overlong"](texts, completion_ids=ids, longest=100, margin=20)
    assert penalties == [0, 0, -0.5, -1, -1]
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [5]]
    repeated = RULES["repetition"](texts, completion_ids=ids, size=2)
    assert repeated == pytest.approx([0, -0.75, 0])


@pytest.mark.nightly
def test_penalties_equal_those_of_trl():
    pytest.importorskip("trl")
    from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

    random = np.random.default_rng(0)
    ids = [random.integers(0, 9, n).tolist() for n in random.integers(1, 60, 50)]
    texts = [""] * len(ids)
    theirs = get_soft_overlong_punishment(40, 15)(ids)
    assert RULES["overlong"](texts, completion_ids=ids, longest=40, margin=15) == theirs
    theirs = get_repetition_penalty_reward(2, -0.5)(ids)
    ours = RULES["repetition"](texts, completion_ids=ids, size=2, penalty=-0.5)
    assert ours == pytest.approx(theirs)


def test_layouts_of_tests_of_programs_are_read():
    pair = [ProgramTest(text="1", output="2")]
    assert read_program_tests("assert f(1) == 2") == [ProgramTest("assert f(1) == 2")]
    assert read_program_tests(["a", "b"]) == [ProgramTest("a"), ProgramTest("b")]
    assert read_program_tests([{"input": 1, "output": 2}]) == pair
    assert read_program_tests({"inputs": ["1"], "outputs": ["2"]}) == pair
    assert read_program_tests('{"inputs": ["1"], "outputs": ["2"]}') == pair
    assert read_program_tests("[f(1), 2][0]") == [ProgramTest("[f(1), 2][0]")]
    for tests, message in [
        (3, "are no tests"),
        ([3], "are no tests"),
        ({"inputs": ["1"]}, "are no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (["a"] * 257, "the maximum is 256"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_program_tests(tests)
    assert extract_program("a\n```python\nx = 1\n```\nand\n```\ny = 2\n") == "y = 2\n"
    assert extract_program("x = 1") == "x = 1"


@pytest.mark.nightly
def test_programs_are_scored_by_the_tests_that_they_pass():
    fence = "```python\n{}\n```"
    texts = [
        fence.format("def f(x):\n    return 2 * x"),
        fence.format("def f(x):\n    return 2"),
        fence.format("import os\nos._exit(0)"),
        fence.format("while True: pass"),
        "no program at all",
        "anything",
    ]
    tests = ["assert f(1) == 2", "assert f(3) == 6"]
    rows = [tests] * 5 + [None]
    run = RULES["code"]
    assert run(texts, tests=rows, seconds=2.0) == [1, 0.5, 0, 0, 0, None]
    assert run(texts[:2], tests=rows[:2], seconds=5.0, all_tests=True) == [1, 0]
    spoken = [{"input": "3\n", "output": "6"}, {"input": "4", "output": "9"}]
    doubled = "n = int(input())\nprint(2 * n)"
    assert run([doubled], cases=[spoken], field="cases") == [0.5]
    too_long = "x = 1\n" * 20_000
    assert run([too_long], tests=[["assert x"]]) == [0]


class JudgeServer(BaseHTTPRequestHandler):
    """A judge that gives the next of its replies: a text, or a status."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked.append((body, self.headers["Authorization"]))
        reply = server.replies.pop(0)
        status = reply if isinstance(reply, int) else 200
        text = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def judge_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), JudgeServer)
    server.asked, server.replies = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server, texts, **settings):
    given = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "m", "parallel": 1}
    prompts = [[{"role": "user", "content": "1 + 1?"}]] * len(texts)
    return RULES["judge"](prompts, texts, **given, **settings)


def test_judge_scores_completions_and_remembers_them(judge_server, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "secret")
    settings = {"cache": str(tmp_path / "judge.jsonl"), "api_key_variable": "KEY"}
    settings |= {"reference": "right", "right": ["2"] * 3}
    judge_server.replies += ['thoughts {"score": 3}', '{"score": "10"}']
    assert ask(judge_server, ["two", "2", "two"], **settings) == [0.3, 1, 0.3]
    (body, key), _ = judge_server.asked
    question = body["messages"][0]["content"]
    assert key == "Bearer secret" and body["temperature"] == 0
    assert "user: 1 + 1?" in question and "two" in question and "2\n</reference>" in question
    # Another process reads the file.
    from ed_trainers.rewards.judges import get_judge

    get_judge.cache_clear()
    assert ask(judge_server, ["2", "two", "2"], **settings) == [1, 0.3, 1]
    assert len(judge_server.asked) == 2


def test_rubric_is_the_weighted_mean_of_its_criteria(judge_server):
    rubric = {"It is right.": 3.0, "It is short.": 1.0}
    judge_server.replies += ['{"1": 5, "2": 1}', '{"1": 5}']
    given = {"rubric": rubric, "lowest": 1.0, "highest": 5.0, "retries": 0}
    assert ask(judge_server, ["x", "y"], **given) == [0.75, None]
    question = judge_server.asked[0][0]["messages"][0]["content"]
    assert "1. It is right.\n2. It is short." in question


def test_judge_without_an_answer_gives_no_reward(judge_server, monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    judge_server.replies += [503, '{"score": 11}', '{"score": 5}']
    assert ask(judge_server, ["a"], retries=2) == [0.5]
    judge_server.replies += ["no score", '{"score": true}']
    assert ask(judge_server, ["b"], retries=1) == [None]
    assert "no valid answer for 1 of 1 completions" in capsys.readouterr().out
    judge_server.replies += ['{"score": 5}']
    assert ask(judge_server, ["c", "d", "e"], max_requests=1) == [0.5, None, None]
    assert "had its 1 requests" in capsys.readouterr().out
    assert not judge_server.replies


def test_agreement_of_judges_counts_completions_with_both_rewards():
    rewards = np.array(
        [[1, 0.1, 5], [2, 0.3, 5], [2, 0.2, 5], [3, 0.9, 5], [9, np.nan, 5]], np.float32
    )
    scores = Scores(rewards, rewards.sum(1), ("number", "judge_1", "judge_2"))
    agreement = scores.measure_agreement()
    assert [*agreement] == [
        "agreement/number/judge_1",
        "agreement/number/judge_2",
        "agreement/judge_1/judge_2",
    ]
    # Five of six pairs have one order, and one pair of the first reward is equal.
    assert agreement["agreement/number/judge_1"] == pytest.approx(5 / np.sqrt(5 * 6))
    assert np.isnan(agreement["agreement/number/judge_2"])
    assert {*agreement} <= {*scores.figures()}
    alone = Scores(rewards, rewards.sum(1), ("number", "judged", "exact"))
    assert not alone.measure_agreement()


def test_judge_that_refuses_stops_the_run(judge_server):
    judge_server.replies += [401]
    given = {"url": f"http://127.0.0.1:{judge_server.server_port}/v1", "model": "refused"}
    rewards = Rewards([{"judge": given}])
    with pytest.raises(RewardError, match="refused a request with status 401"):
        rewards(some(["a"]))
    for settings, message in [
        ({"question": "Is it good?"}, "needs \\$completion"),
        ({"question": "$completion $answer"}, "may have"),
        ({"highest": 0.0}, "is not above lowest"),
        ({"api_key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ]:
        with pytest.raises(EasyDeLError, match=message):
            ask(judge_server, ["x"], **settings)
    with pytest.raises(ConfigError, match="is no address of a server"):
        RULES["judge"](["p"], ["x"], url="localhost", model="m")


def test_math_verify_names_its_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ed-trainers\[math\]"):
        check("math_verify", r"\boxed{1}", "1")


@pytest.mark.nightly
def test_math_verify_compares_values_and_ends_at_its_limit():
    pytest.importorskip("math_verify")
    cases = [
        (r"$\boxed{\frac{2}{4}}$", "0.5", 1),
        (r"\boxed{x(x+1)}", "$x^2+x$", 1),
        (r"\boxed{x(x-1)}", "$x^2+x$", 0),
        (r"\boxed{(0, 1]}", r"$\left(0, 1\right]$", 1),
        (r"\boxed{[0, 1]}", r"$\left(0, 1\right]$", 0),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1),
        (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$", 1),
        ("no formula", "$3$", 0),
        (r"\boxed{3}", None, None),
    ]
    texts, answers, rewards = zip(*cases, strict=True)
    assert RULES["math_verify"](texts, answer=answers) == list(rewards)
    slow = [r"\boxed{9^{9^{9^{9^{9}}}}}", r"\boxed{1}"]
    assert RULES["math_verify"](slow, answer=["$1$", "$1$"], seconds=1.0) == [0, 1]


@pytest.mark.nightly
def test_math_verify_equals_the_reward_of_trl():
    pytest.importorskip("math_verify")
    pytest.importorskip("trl")
    from trl.rewards import accuracy_reward

    texts = [r"so \boxed{\frac{1}{3}}", r"\boxed{0.333}", r"\boxed{5\text{ cm}}", "$7$", "8"]
    answers = [r"\frac{1}{3}", r"\frac{1}{3}", "$5$", "$7$", "$8$"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert RULES["math_verify"](chats, answer=answers) == accuracy_reward(chats, answers)
