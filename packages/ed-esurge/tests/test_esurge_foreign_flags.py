"""Command lines of vLLM and llama.cpp start the same server."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest
import typer
from ed_esurge.command.flags import read_flag_file
from ed_esurge.command.foreign_flags import FOREIGN_FLAGS, translate_flags
from ed_esurge.command.load import ModelArguments, served_engine
from ed_esurge.command.main import app, main
from ed_esurge.server.options import ServerOptions
from ed_infra.errors import ConfigError
from released_flags import LLAMA_CPP, VLLM

#: Flags that vLLM's documentation and recipes use most.
COMMON = """
--model --tokenizer --tokenizer-mode --trust-remote-code --dtype --max-model-len --seed
--hf-overrides --revision --served-model-name --load-format --download-dir --quantization
--enforce-eager --tensor-parallel-size --pipeline-parallel-size --data-parallel-size
--enable-expert-parallel --gpu-memory-utilization --block-size --swap-space --cpu-offload-gb
--kv-cache-dtype --enable-prefix-caching --no-enable-prefix-caching --max-num-batched-tokens
--max-num-seqs --enable-chunked-prefill --scheduling-policy --async-scheduling --max-logprobs
--disable-log-requests --enable-log-requests --disable-log-stats --uvicorn-log-level --host --port
--api-key --allowed-origins --lora-modules --enable-lora --max-loras --max-lora-rank
--max-cpu-loras --chat-template --chat-template-content-format --tool-call-parser
--enable-auto-tool-choice --reasoning-parser --generation-config --override-generation-config
--limit-mm-per-prompt --runner --task --speculative-config --compilation-config
--distributed-executor-backend --attention-backend --structured-outputs-config --ssl-keyfile
--ssl-certfile --disable-custom-all-reduce --num-gpu-blocks-override --enable-sleep-mode
--kv-transfer-config --otlp-traces-endpoint --middleware --root-path
"""


@pytest.fixture(scope="module")
def parameters():
    command = typer.main.get_command(app).commands["serve"]
    return command.get_params(typer.Context(command))


def flags_of(parameters) -> set[str]:
    return {flag for one in parameters for flag in (*one.opts, *one.secondary_opts)}


def translated(line: str) -> list[str]:
    return translate_flags(shlex.split(line)).words


@pytest.mark.parametrize("names", [VLLM, LLAMA_CPP], ids=["vllm", "llama.cpp"])
def test_every_flag_of_a_released_server_is_known(names: str, parameters) -> None:
    known = flags_of(parameters) | {name for flag in FOREIGN_FLAGS for name in flag.names}
    # The parser answers --api-key: the arguments of a program are readable by every user.
    assert set(names.split()) - known - {"--api-key", "-h", "--help", "--usage"} == set()


def test_every_target_is_a_flag_of_the_server(parameters) -> None:
    targets = {flag.target for flag in FOREIGN_FLAGS} - {"", "MODEL"}
    assert targets <= flags_of(parameters)


def test_every_flag_has_a_meaning_a_reason_or_a_way_out() -> None:
    for flag in FOREIGN_FLAGS:
        assert flag.target or flag.note or flag.refusal, flag.names
        omits = "" in flag.values.values() or flag.unless
        assert flag.note or not omits or flag.target, flag.names
        assert not (flag.target and flag.refusal), flag.names
        assert not flag.is_switch or flag.convert is None


def test_each_flag_has_one_row() -> None:
    rows = Counter(name for flag in FOREIGN_FLAGS for name in flag.names)
    assert [one for one, count in rows.items() if count > 1] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m --dtype half", "m --dtype float16"),
        ("m --dtype=bfloat16", "m --dtype bfloat16"),
        ("m --max_model_len 32k", "m --max-model-len 32000"),
        ("m --max-model-len=8K", "m --max-model-len 8192"),
        ("--model m --block-size 32", "m --page-size 32"),
        ("m --gpu-memory-utilization 0.8", "m --gpu-memory-utilization 0.8"),
        ("m --enable-lora", "m --max-loras 1"),
        ("m --enable-lora --max-loras 4", "m --max-loras 4"),
        ("m --tool-call-parser hermes --enable-auto-tool-choice", "m --tool-parser-name hermes"),
        ('m --allowed-origins \'["http://a", "http://b"]\'', "m --cors-origins http://a http://b"),
        ("m --quantization awq_marlin --enforce-eager", "m --quantization awq"),
        ("m --generation-config vllm", "m --generation-config none"),
        ("m -pp 1 -O 3 --load-format auto --runner pooling", "m"),
        ("m --uvicorn-log-level trace", "m --log-level debug"),
        ("m -c 4096 -np 4 -ngl 99 -fa on --jinja", "m --max-model-len 4096 --max-num-seqs 4"),
        ("-m m.gguf -c 0 -s 7 -a name", "m.gguf --seed 7 --served-model-name name"),
        (
            "m -ctk q8_0 -ctv q8_0 --cache-ram 2048",
            "m --kv-cache-dtype int8 --kv-offloading-size 2.0",
        ),
        ("m --no-cache-prompt -v", "m --no-enable-prefix-caching --log-level debug"),
        ("m -- --model n", "m -- --model n"),
        ("m --page-size 8 --also a b", "m --page-size 8 --also a b"),
    ],
)
def test_flag_is_translated(line: str, words: str) -> None:
    assert translated(line) == words.split(" ")


def test_options_of_samplers_become_defaults_of_requests() -> None:
    words = translated("m --temp 0.2 --top-k 5 --override-generation-config '{\"top_p\": 0.9}'")
    assert words[:2] == ["m", "--override-generation-config"]
    values = {"temperature": 0.2, "top_k": 5, "top_p": 0.9}
    assert json.loads(words[2]) == values
    assert (
        ServerOptions(override_generation_config=values).override_generation_config.values == values
    )


@pytest.mark.parametrize(
    ("line", "way_out"),
    [
        ("m --enable-expert-parallel", "--sharding-axis-dims"),
        ("m -pp 2", "--tensor-parallel-size"),
        ("m --pipeline-parallel-size=2", "--tensor-parallel-size"),
        ("m --load-format dummy", "omit the flag"),
        ("m --device cpu", "JAX_PLATFORMS"),
        ("m -n 128", "max_tokens"),
        ("m --mmproj x.gguf", "safetensors"),
        ("m --lora a.gguf", "--lora-modules NAME=PATH"),
        ("m --temp hot", "--override-generation-config"),
        ("m --cache-ram much", "--kv-offloading-size"),
        ("m --allowed-origins *", "--cors-origins"),
    ],
)
def test_flag_without_counterpart_is_refused_with_the_way_out(line: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        translate_flags(line.split(" "))


def test_flag_without_effect_is_named_with_its_reason() -> None:
    notes = translate_flags(["m", "--enforce-eager", "-t", "8"]).notes
    assert [note.split(" ")[0] for note in notes] == ["--enforce-eager", "-t"]
    assert "XLA" in notes[0] and "taskset" in notes[1]


def test_missing_value_is_reported_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--max-model-len"]) == 2
    assert "requires an argument" in capsys.readouterr().err


def test_secret_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--api-key", "SECRET"], ["--api-key=SECRET"], ["--api_key", "SECRET"]):
        assert main(["serve", "m", *words]) == 2
        assert "SECRET" not in "".join(capsys.readouterr())


def test_file_of_flags_has_flags_of_other_servers(parameters, tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "max_model_len: 32k\nblock-size: 32\nenable-auto-tool-choice: true\n"
        "enable-lora: false\nquantization: awq\noverride-generation-config: {top_k: 3}\n"
        'allowed-origins: ["http://a", "http://b"]\n'
    )
    values = read_flag_file(str(path), parameters, [])
    assert json.loads(str(values.pop("override_generation_config"))) == {"top_k": 3}
    assert values == {
        "max_model_len": "32000",
        "page_size": "32",
        "cors_origins": ["http://a", "http://b"],
        "quantization": "awq",
    }
    path.write_text("enable-expert-parallel: true\n")
    with pytest.raises(ConfigError, match=r"vllm\.yaml.*sharding-axis-dims"):
        read_flag_file(str(path), parameters, [])


def test_adapters_are_json_objects_as_in_vllm() -> None:
    entries = ["a=x", '{"name": "b", "path": "y", "base_model_name": "m"}']
    assert ServerOptions(lora_modules=entries).lora_modules == {"a": "x", "b": "y"}
    for entry in ('{"name": "b"}', '{"name": "b", "path": "y", "rank": 8}', "{b", "b"):
        with pytest.raises(ValueError, match="NAME=PATH"):
            ServerOptions(lora_modules=[entry])


def test_table_covers_the_common_flags_of_vllm(parameters) -> None:
    names = {name for flag in FOREIGN_FLAGS if flag.program == "vLLM" for name in flag.names}
    assert set(COMMON.split()) <= names | flags_of(parameters)


@pytest.mark.parametrize("stored", [None, "gptq"])
def test_format_of_a_packed_checkpoint_is_compared(tmp_path: Path, stored: str | None) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": stored}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ModelArguments(model=str(tmp_path), quantization="awq")
    with pytest.raises(ConfigError, match=f"quant_method={stored!r}: leave --quantization out"):
        served_engine(arguments)


def test_flags_of_a_file_are_translated_together(parameters, tmp_path: Path) -> None:
    path, notes = tmp_path / "flags.yaml", []
    path.write_text("max-loras: 4\nenable-lora: true\ntemp: 0.2\ntop-k: 5\nenforce-eager: true\n")
    values = read_flag_file(str(path), parameters, notes)
    assert json.loads(str(values["override_generation_config"])) == {"temperature": 0.2, "top_k": 5}
    assert values["max_loras"] == "4"
    assert [note.split(" ")[0] for note in notes] == ["--enable-lora", "--enforce-eager"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("model: x", "on the command line"), ("enable-lora: yes please", "must be true or false")],
)
def test_file_of_flags_names_its_mistakes(parameters, tmp_path: Path, text, message) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"flags\.yaml.*{message}"):
        read_flag_file(str(path), parameters, [])
