"""Every Python, YAML and bash block of the documents of EasyDeL and EasyLM runs unchanged.

The id of a test is `document:line`. `tests.guides.documented` states what the folder of the blocks
contains. A block that continues earlier blocks runs after them. A YAML block that shows a part of
a run file is completed by `REST`. The default run checks the run files, and the nightly run
executes them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from ed_elarge.command.runs import run_file
from ed_elarge.config import nodes
from ed_elarge.config.layers import merge_documents
from ed_elarge.config.normalize import normalize
from ed_elarge.config.table import check_machine
from ed_elarge.errors import InputError

from tests.guides.documented import SUBSTITUTED, Example, everything, examples, make_folder

#: Sections that complete a part of a run file.
REST = """
model: {name_or_path: meta-llama/Llama-2-7b-hf}
mixture:
  informs: [{data_files: "train/*.json", content_field: text}]
  tokenization: {max_length: 64}
trainer: {trainer_type: sft, max_training_steps: 2, save_directory: rest}
"""
#: Blocks that show every key of a section. Each key is checked with the method that reads the key.
REFERENCES = ("83", "98", "108", "122", "141", "159", "172", "197", "269", "304")
#: Blocks that show a part of a run file, and the block with three alternatives of one section.
PARTS, ALTERNATIVES = ("45", "696", "710", "718", "742"), ("726",)
#: Keys of the reference of `mixture` and `trainer` that need other keys -> these keys.
TOGETHER: dict[str, dict[str, Any]] = {
    "mixture_weights": {
        "informs": [
            {"name": name, "data_files": "train/*.json", "content_field": "text"}
            for name in ("train_data", "valid_data")
        ]
    },
}
#: Sections of the references that belong to another method or task than `REST` -> its sections.
BELONGS: dict[str, dict[str, Any]] = {
    "teacher_model": {"trainer": {"trainer_type": "distillation"}},
    "reference_model": {
        "trainer": {"trainer_type": "dpo"},
        "mixture": {"informs": [{"data_files": "preference_data.json"}]},
    },
    "visual": {"model": {"task": "image-text-to-text"}},
}
ALL = everything()
YAML = [one for one in ALL if one.block.language == "yaml"]


def test_every_name_of_the_hub_in_a_block_has_a_local_directory() -> None:
    names = {
        found
        for one in ALL
        for found in re.findall(r"[\"' ]([\w-]+/[\w.-]+-[\w.-]+)[\"'\n]", one.body)
        if not found.endswith((".json", ".parquet"))
    }
    assert names <= {*SUBSTITUTED, "my-username/my-model"}, names - {*SUBSTITUTED}
    assert len(ALL) == 72


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, quickstart_model: Path) -> Path:
    """A folder with local directories for the names of the hub."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("documented")
    make_folder(folder, AutoTokenizer.from_pretrained(quickstart_model))
    return folder


@pytest.fixture
def here(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shared)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return shared


def line_of(one: Example) -> str:
    return one.name.partition(":")[2]


def run_files(one: Example) -> Iterator[str]:
    """Yield the run files of a YAML block: itself, its alternatives, or one for each key."""
    line = line_of(one)
    if line in ALTERNATIVES:
        yield from (part for part in one.body.split("\n\n") if part.strip())
    elif line in REFERENCES:
        yield from keys_alone(yaml.safe_load(one.body))
    else:
        yield one.body


def keys_alone(block: dict[str, Any]) -> Iterator[str]:
    """Yield a run file for each key of the sections of a block, and for each entry of `informs`."""
    for section, keys in block.items():
        for key, value in keys.items():
            for item in [[one] for one in value] if key == "informs" else [value]:
                kind = item[0]["type"] if key == "informs" else section
                own = {**named(block, section), **TOGETHER.get(key, {}), key: item}
                yield yaml.safe_dump({**BELONGS.get(kind, {}), section: own})


def named(block: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the keys without which a section is invalid."""
    kept = ("name_or_path", "pack_tokens", "axis_dims", "evaluation_steps")
    return {key: value for key, value in block[section].items() if key in kept}


def completed(text: str, name: str) -> Any:
    """Return a run file with the sections that the text lacks."""
    return merge_documents(nodes.parse_yaml(REST, "rest.yaml"), nodes.parse_yaml(text, name))


@pytest.mark.parametrize("one", YAML, ids=lambda one: one.name)
def test_yaml_block_is_a_valid_run_file(one: Example, here: Path) -> None:
    line = line_of(one)
    is_part = line in (*PARTS, *ALTERNATIVES, *REFERENCES)
    for number, text in enumerate(run_files(one)):
        document = (completed if is_part else nodes.parse_yaml)(text, f"{one.name}.{number}")
        run = normalize(document)
        if line in REFERENCES and "images" not in text and "parquet" not in text:
            check_machine(run)
        for warning in run.warning_texts():
            assert "has no effect" in warning


#: The types in the comment of the reference of `trainer` -> the sections that they need, and the
#: value of the option that the block names `beta`, `lambda_orpo` or `kl_coef`.
TYPES: dict[str, tuple[dict[str, Any], float | None]] = {
    "sft": ({}, None),
    "dpo": ({"mixture": {"informs": [{"data_files": "preference_data.json"}]}}, 0.1),
    "orpo": ({"mixture": {"informs": [{"data_files": "preference_data.json"}]}}, 0.3),
    "grpo": (
        {
            "trainer": {"reward_functions": "exact"},
            "mixture": {"informs": [{"data_files": "preference_data.json"}]},
        },
        0.2,
    ),
    "reward": ({"mixture": {"informs": [{"data_files": "preference_data.json"}]}}, None),
    "distillation": ({"teacher_model": {"name_or_path": "model-name"}}, 0.1),
}


@pytest.mark.parametrize("kind", TYPES)
def test_trainer_reference_is_accepted_for_every_type_of_its_comment(kind: str, here: Path) -> None:
    [one] = [one for one in YAML if one.name == "004:269"]
    assert kind in one.body.splitlines()[1].partition("#")[2]
    sections, value = TYPES[kind]
    # The table of trainers of the same document names lambda_orpo beside beta.
    own = {"kl_coef": 0.2, "lambda_orpo": 0.3, "trainer_type": kind}
    block = yaml.safe_load(one.body)["trainer"] | own | sections.get("trainer", {})
    text = yaml.safe_dump({**sections, "trainer": block, "actions": ["train"]})
    run = normalize(completed(text, f"{one.name}.{kind}"))
    assert getattr(run.trainer, "beta", None) == value
    assert all("has no effect" in text for text in run.warning_texts())
    with pytest.raises(InputError, match="did you mean 'beta'"):
        normalize(completed(text.replace("  beta:", "  betaa:"), "misspelled.yaml"))


def test_mixture_reference_is_accepted_whole(here: Path) -> None:
    [one] = [one for one in YAML if one.name == "004:197"]
    model = {"model": {"task": "image-text-to-text"}}
    document = completed(f"{yaml.safe_dump(model)}{one.body}", one.name)
    run = normalize(document)
    assert len(run.mixture.informs) == 4 and run.mixture.weights is None
    assert "mixture_weights: has no effect: no inform has one of its names" in "".join(
        run.warning_texts()
    )


def process(arguments: list[str], devices: int = 1) -> str:
    """Run Python with some simulated devices, and return its output."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "XLA_FLAGS": flags, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "one",
    [one for one in YAML if line_of(one) not in (*REFERENCES, "430")],
    ids=lambda one: one.name,
)
def test_yaml_block_runs(one: Example, here: Path) -> None:
    is_part = line_of(one) in (*PARTS, *ALTERNATIVES)
    Path("rest.yaml").write_text(REST.replace("rest}", f"rest-{line_of(one)}}}"))
    Path("train.yaml").write_text("actions: [train]\n")
    for text in run_files(one):
        if line_of(one) in ALTERNATIVES and "[1, 4, 8, 1, 1]" in text:
            text = text.replace("[1, 4, 8, 1, 1]", "[1, 1, 2, 1, 1]")  # two devices, not 32
        Path("block.yaml").write_text(text)
        below = ["rest.yaml", *([] if "actions:" in text else ["train.yaml"])]
        run = f"include: {[*below, 'block.yaml']}\n" if is_part else text
        Path("run.yaml").write_text(run)
        process(["-m", "easydel.scripts.elarge", "run.yaml"], 2 if "2, 1" in text else 1)
    written = {"397": "eval_results.json", "710": "saved_config.yaml"}.get(line_of(one))
    if written:
        assert Path(written).is_file()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_server_of_the_yaml_block_answers(here: Path) -> None:
    [one] = [one for one in YAML if line_of(one) == "430"]
    Path("serve.yaml").write_text(one.body.replace("port: 8000", "port: 18431"))
    with served([sys.executable, "-m", "easydel.scripts.elarge", "serve.yaml"], 18431) as reply:
        assert "Llama-2-7b-chat-hf" in reply("/v1/models")


class served:
    """A server in a process, until the end of the block."""

    def __init__(self, command: list[str], port: int) -> None:
        self.command, self.url = command, f"http://127.0.0.1:{port}"

    def __enter__(self) -> Any:
        self.process = subprocess.Popen(self.command, env={**os.environ, "XLA_FLAGS": ""})
        for _ in range(300):
            try:
                self.reply("/health")
                return self.reply
            except OSError:
                assert self.process.poll() is None
                time.sleep(1)
        raise TimeoutError

    def reply(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


# Bash blocks.


@pytest.mark.parametrize(
    "one", [one for one in ALL if one.block.language == "bash"], ids=lambda one: one.name
)
@pytest.mark.nightly
def test_bash_block_runs(one: Example, here: Path) -> None:
    Path("config.yaml").write_text(f"{REST}actions: [validate, dump_config]\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", one.body],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "name_or_path: meta-llama/Llama-2-7b-hf" in done.stdout


# Python blocks. `test_guide_blocks.py` runs and checks those of the documents 000 and 001.


class Guide:
    """The names of a document, whose blocks run from top to bottom."""

    def __init__(self, document: str, names: dict[str, Any]) -> None:
        self.names, self.done = names, set[str]()
        self.examples = {one.name: one for one in examples(document)}

    def run(self, *wanted: str) -> dict[str, Any]:
        """Run blocks that have not run, in order."""
        for name in wanted:
            if name not in self.done:
                self.done.add(name)
                one = self.examples[name]
                source = "\n" * (one.block.line - 1) + one.body
                exec(compile(source, str(one.block.page), "exec"), self.names)
        return self.names


@pytest.fixture(scope="module")
def elarge() -> Guide:
    """The Python part of the guide of `eLargeModel`, after its first import."""
    from easydel.infra import eLargeModel

    return Guide("004", {"eLargeModel": eLargeModel})


def test_004_564(elarge: Guide, here: Path) -> None:
    names = elarge.run("004:564")
    assert names["elm"].config.task.value == "causal-language-model"


def test_004_580(elarge: Guide, here: Path) -> None:
    Path("training_config.yaml").write_text(REST)
    Path("training_config.json").write_text('{"model": {"name_or_path": "model-name"}}')
    elarge.run("004:580")
    assert Path("config.yaml").is_file()
    assert run_file("config.yaml", dry_run=True) == 2  # the saved file has no actions


def test_004_594(elarge: Guide, here: Path) -> None:
    assert elarge.run("004:594")["elm"].config.sharding.axis_dims == (1, -1, 1, 1, 1)


#: Code after a block of the guide: what the reader has, and what the block must have made.
AFTER = {
    "004:534": "assert trainer_output.metrics['steps'] > 0",
    # The block after the next one builds these models beside the trained one.
    "004:607": "model = {'name_or_path': 'model-name'}\n"
    "elm.update_config({'teacher_model': model, 'reference_model': model})\n"
    # The first block has trained other data into the default directory.
    "elm.update_config({'trainer': {'max_training_steps': 2, 'save_directory': 'second'}})",
    "004:624": "assert model.is_quantized and esurge.max_model_len == 4096 and teacher is not None",
    "004:650": "assert {'hellaswag', 'mmlu', 'gsm8k'} <= {*results['results']}\n"
    "assert 0 <= results['results']['hellaswag']['acc'] <= 1",
    "004:669": "",
}


@pytest.fixture(scope="module")
def python_blocks(shared: Path) -> str:
    """The output of a program of the blocks from `import` to `clear_cache`."""
    before = Path.cwd()
    os.chdir(shared)
    try:
        found = {one.name: one for one in ALL}
        parts = [
            f"{found[name].body}\n{after}\nprint('done {name}', flush=True)\n"
            for name, after in AFTER.items()
        ]
        Path("blocks.py").write_text("\n".join(parts))
        return process(["blocks.py"])
    finally:
        os.chdir(before)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", AFTER)
def test_python_block_of_the_elarge_guide_runs(python_blocks: str, name: str) -> None:
    assert f"done {name}" in python_blocks


def test_002_sessions(here: Path) -> None:
    import easydel as ed
    from jax.sharding import PartitionSpec

    class SomeConfig:
        pass

    names: dict[str, Any] = {
        **{name: getattr(ed, name) for name in ("EasyDeLBaseConfig", "extract_commit_hash")},
        **{name: getattr(ed, name) for name in ("set_attrs_smartly", "NOT_GIVEN")},
        # The example is part of the inherited documentation of transformers, and about its class:
        # it ignores the unknown keyword `foo`, which an `EasyDeLBaseConfig` refuses.
        "BertConfig": transformers.BertConfig,
        "PartitionSpec": PartitionSpec,
        "SomeConfig": SomeConfig,
    }
    guide = Guide("002", names)
    assert guide.run("002:26")["config"].attn_mechanism == "flash_attn2"
    assert dict(guide.run("002:295")["mesh"].shape) == {
        "dp": 4,
        "fsdp": 1,
        "ep": 1,
        "tp": 2,
        "sp": 1,
    }
    guide.run("002:388")
    names["config"] = ed.EasyDeLBaseConfig()
    assert guide.run("002:422")["dims"] == (2, 4, 1, 1, 1)
    assert guide.run("002:435")["names"] == ("dp", "fsdp", "ep", "tp", "sp")
    assert guide.run("002:453")["config"].get_backend() == "gpu"
    assert guide.run("002:456")["config"].get_backend() == "cpu"
    assert len(guide.run("002:579")["MyModelConfig"]().get_partition_rules()) == 3
    assert guide.run("002:624")["mesh"].shape["dp"] == 2
    assert guide.run("002:642")["spec"] is not None
    assert guide.run("002:894")["commit_hash"] is None  # the path in the example has three dots
    guide.run("002:916")
    assert (names["config"].hidden_size, names["config"].num_layers) == (1024, 12)


# EasyLM.

EASYLM = {
    "model": {"name_or_path": "model-name"},
    "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
    "mixture": {
        "informs": [{"data_files": "train.json", "content_field": "text"}],
        "pack_tokens": True,
        "pack_seq_length": 64,
    },
    "trainer": {"learning_rate": 1e-2, "total_batch_size": 8, "max_training_steps": 8},
}


@pytest.mark.nightly
def test_003_139(here: Path) -> None:
    from EasyLM.data import DataProcessor
    from EasyLM.models.llama import LLaMAModel
    from EasyLM.optimizers import create_optimizer

    model = LLaMAModel(EASYLM)
    optimizer = create_optimizer(model)
    first = next(iter(DataProcessor(EASYLM)))
    losses = [model.train_step(first, optimizer) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    names = Guide("003", {"config": EASYLM}).run("003:139")
    assert 0 < names["loss"] < 10
    assert int(names["model"].state.step) == len(names["data_processor"])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_003_155(here: Path) -> None:
    [one] = [one for one in ALL if one.name == "003:155"]
    Path("server.py").write_text(f"path = 'model-name'\n{one.body}")
    with served([sys.executable, "server.py"], 5007) as reply:
        assert reply("/ready") == "Ready!\n"


def test_003_166(here: Path, tmp_path: Path) -> None:
    import jax.numpy as jnp

    state = {"params": {"kernel": jnp.arange(6.0).reshape(2, 3)}}
    names = {"directory": str(tmp_path / "checkpoints"), "model_state": state}
    loaded = Guide("003", names).run("003:166")["model_state"]
    assert (loaded["params"]["kernel"] == state["params"]["kernel"]).all()
