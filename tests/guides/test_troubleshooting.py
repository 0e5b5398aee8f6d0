"""Each message of docs/troubleshooting.md is printed by the code in the case of its heading."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_data.errors import DataError
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.config.table import check_machine
from ed_elarge.exits import run_work
from ed_elarge.model import eLargeModel
from ed_infra.errors import EasyDeLError

from tools.workspace import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
#: A heading, and the message below it.
ENTRY = re.compile(r"^### ([^\n]+)\n+```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = "model: {name_or_path: runs/quickstart/model}\n"

Case = Callable[[pytest.MonkeyPatch], None]
CASES: dict[str, Case] = {}


def case(heading: str) -> Callable[[Case], Case]:
    """Add a function that raises or prints the message of a heading."""

    def add(function: Case) -> Case:
        CASES[heading] = function
        return function

    return add


def run_file(text: str) -> Any:
    """Validate a run file, and its files and ports."""
    run = normalize(nodes.parse_yaml(text, "run.yaml"))
    check_machine(run)
    return run


def data(text: str) -> None:
    """Read the batches of a mixture with the model of the quickstart."""
    trainer = "trainer: {max_training_steps: 1, total_batch_size: 8, max_length: 32}\n"
    eLargeModel(yaml.safe_load(f"{MODEL}{trainer}{text}")).build_dataset()


@case("Unknown key")
def unknown_key(_: pytest.MonkeyPatch) -> None:
    run_file(f"{MODEL}trainer:\n  learning_ratee: 1\n")


@case("A file of another program")
def unknown_section(_: pytest.MonkeyPatch) -> None:
    run_file("base_model: meta-llama/Llama-2-7b-hf\n")


@case("The sequence length exceeds the model")
def sequence_length(_: pytest.MonkeyPatch) -> None:
    config = "{model_type: llama, max_position_embeddings: 2048}"
    model = f"model: {{config: {config}, tokenizer: PATH}}\n"
    mixture = "mixture: {informs: [{data_files: a.json}], pack_tokens: true, pack_seq_length: 4096}"
    run_file(f"{model}{mixture}\n")


@case("The batch does not divide")
def microbatches(_: pytest.MonkeyPatch) -> None:
    run_file(f"{MODEL}trainer: {{total_batch_size: 32, gradient_accumulation_steps: 5}}\n")


@case("A data file is missing")
def data_file(_: pytest.MonkeyPatch) -> None:
    run_file(f"{MODEL}mixture: {{informs: [{{data_files: chats.jsonl}}]}}\n")


@case("A row has other fields")
def fields(_: pytest.MonkeyPatch) -> None:
    data("mixture: {informs: [{data_files: examples/data/answers.jsonl}]}\n")


@case("The tokenizer has no chat template")
def chat_template(_: pytest.MonkeyPatch) -> None:
    for file in Path("runs/quickstart/model").glob("chat_template*"):
        file.unlink()
    settings = Path("runs/quickstart/model/tokenizer_config.json")
    kept = json.loads(settings.read_text())
    kept.pop("chat_template", None)
    settings.write_text(json.dumps(kept))
    data("mixture: {informs: [{data_files: examples/data/chats.jsonl, content_field: messages}]}\n")


@case("No token has a loss")
def no_loss(_: pytest.MonkeyPatch) -> None:
    row = {"messages": [{"role": "user", "content": "Hello."}]}
    Path("chats.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    inform = "{data_files: chats.jsonl, content_field: messages}"
    keys = "pack_tokens: true, tokenization: {assistant_only_loss: true}"
    data(f"mixture: {{informs: [{inform}], {keys}}}\n")


@case("The mesh does not match the devices")
def mesh(_: pytest.MonkeyPatch) -> None:
    from ed_infra import create_mesh

    create_mesh((1, -1, 1, 3, 1))


@case("The devices are not found")
def backend(_: pytest.MonkeyPatch) -> None:
    from ed_infra import create_mesh

    create_mesh((1, -1, 1, 1, 1), backend="gpu")


@case("Out of memory")
def memory(_: pytest.MonkeyPatch) -> None:
    import jax.numpy as jnp

    assert run_work(lambda: jnp.zeros(2**45).block_until_ready() and None) == 1


@case("A checkpoint of another run")
def other_run(_: pytest.MonkeyPatch) -> None:
    from ed_trainers.checkpoints.run_record import compare_runs

    saved = {"arguments": {"optimizer": "adamw"}}
    run = {"arguments": {"optimizer": "lion"}}
    compare_runs(saved, run, "runs/sft/checkpoints/40", str)


@case("The model is neither here nor on the hub")
def hub(_: pytest.MonkeyPatch) -> None:
    from ed_models.checkpoints.hub import resolve

    resolve("meta-lama/Llama/2")


@case("The hub cannot be reached")
def offline(_: pytest.MonkeyPatch) -> None:
    from ed_models.checkpoints.hub import resolve

    resolve("meta-llama/Llama-2-7b-hf", local_files_only=True, cache_dir="empty")


@case("The checkpoint has pickled weights only")
def pickles(_: pytest.MonkeyPatch) -> None:
    import easydel as ed

    next(Path("runs/quickstart/model").glob("*.safetensors")).unlink()
    Path("runs/quickstart/model/pytorch_model.bin").touch()
    ed.AutoEasyDeLModelForCausalLM.from_pretrained("runs/quickstart/model")


@case("A weight file is incomplete")
def incomplete(_: pytest.MonkeyPatch) -> None:
    import easydel as ed

    file = next(Path("runs/quickstart/model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])
    ed.AutoEasyDeLModelForCausalLM.from_pretrained("runs/quickstart/model")


@case("The architecture is unknown")
def architecture(_: pytest.MonkeyPatch) -> None:
    import easydel as ed

    Path("runs/quickstart/model/config.json").write_text('{"model_type": "lama"}')
    ed.AutoEasyDeLModelForCausalLM.from_pretrained("runs/quickstart/model")


@case("The port is in use")
def port(_: pytest.MonkeyPatch) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 18768))
        used.listen()
        run_file(f"{MODEL}actions:\n  - serve: {{port: 18768}}\n")


@case("The cache has too few pages for a sequence")
def pages(_: pytest.MonkeyPatch) -> None:
    engine(num_pages=4, page_size=16, max_model_len=256)


@case("The memory of the device is too small for the cache")
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from ed_esurge.engine import setup

    monkeypatch.setattr(setup, "accelerator_memory", lambda model: [(2**30, 2**30)])
    engine(page_size=16, max_model_len=256)


@case("The prompt is too long")
def prompt(_: pytest.MonkeyPatch) -> None:
    engine(page_size=16, max_model_len=64).generate([[5] * 100])


def engine(**options: Any) -> Any:
    """Create the engine of the quickstart's model."""
    import easydel as ed

    return (
        ed.eLargeModel.from_pretrained("runs/quickstart/model")
        .set_sharding(axis_dims=(1, 1, 1, 1, 1))
        .set_esurge(max_num_seqs=2, compile_runner=False, **options)
        .build_esurge()
    )


@case("A format of quantization does not match a layer")
def quantization(_: pytest.MonkeyPatch) -> None:
    import jax.numpy as jnp
    from ed_layers.quantization import encode

    encode(jnp.ones((688, 8)), "mxfp4", group_size=32)


@case("A kernel does not exist on the platform")
def kernel(_: pytest.MonkeyPatch) -> None:
    text = f"{MODEL}platform: {{platform: triton}}\n"
    eLargeModel(yaml.safe_load(text)).build_model()


@case("The adapters match no layer")
def adapters(_: pytest.MonkeyPatch) -> None:
    text = f"{MODEL}sharding: {{axis_dims: [1, 1, 1, 1, 1]}}\nlora: {{targets: [query]}}\n"
    eLargeModel(yaml.safe_load(text)).build_model()


@case("The CPU kernels are not built")
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    from ed_layers.native import library

    loaded = library._load_library.__wrapped__
    monkeypatch.setattr(library, "LIBRARY", Path("missing.so"))
    monkeypatch.setattr(library, "_load_library", loaded)
    print(library.describe())


@case("Two distributions provide `easydel`")
def distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    import easydel

    monkeypatch.setattr(metadata, "version", lambda name: "0.3.0")
    easydel._refuse_the_other_easydel()


def entries() -> dict[str, str]:
    """Return heading -> message of the page, without line breaks."""
    return {title: " ".join(text.split()) for title, text in ENTRY.findall(PAGE.read_text("utf-8"))}


def test_every_entry_of_the_page_has_a_case() -> None:
    assert set(entries()) == set(CASES)
    assert len(CASES) >= 20


#: Cases without a model or a compilation, in the default run.
CHEAP = [
    *("Unknown key", "A file of another program", "The sequence length exceeds the model"),
    *("The batch does not divide", "A data file is missing", "The port is in use"),
    *("The mesh does not match the devices", "Out of memory", "A checkpoint of another run"),
]


@pytest.mark.daily(*CHEAP)
@pytest.mark.parametrize("heading", CASES)
def test_message_of_the_page_is_printed_in_its_situation(
    heading: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    if heading in CHEAP:
        Path("runs/quickstart/model").mkdir(parents=True)
        Path("runs/quickstart/model/config.json").write_text('{"model_type": "llama"}')
        Path("runs/quickstart/model/tokenizer.json").write_text("{}")
    else:
        shutil.copytree(request.getfixturevalue("quickstart_model"), "runs/quickstart/model")
    try:
        CASES[heading](monkeypatch)
        captured = capsys.readouterr()
        printed = captured.out + captured.err
    except (EasyDeLError, DataError, ImportError) as error:
        printed = str(error)
    printed = " ".join(printed.split())
    assert printed, "nothing was printed"
    assert entries().get(heading, "?") in printed, printed
