"""The command line: flags, `chat`, `bench`, `run-batch`, and `serve` with a directory."""

from __future__ import annotations

import builtins
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jax
import ollama
import pytest
from ed_esurge.command import serve
from ed_esurge.command.adapter_folders import find_adapter
from ed_esurge.command.bench import RequestTiming, compute_figures, nearest_percentile
from ed_esurge.command.chat import Conversation
from ed_esurge.command.flags import parse_value, read_attribute_docs
from ed_esurge.command.load import (
    EngineFlags,
    create_engine,
    get_model_name,
    get_tokenizer,
    parse_mesh_dims,
    parse_model_arguments,
    served_engine,
)
from ed_esurge.command.main import BAD_INPUT, COMMANDS, main
from ed_esurge.command.program import parse_words
from ed_esurge.config import EngineConfig
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.launch import background
from ed_infra.errors import ConfigError, EasyDeLError
from ed_layers.quantization import QArray
from ed_models.checkpoints import hub
from flax import nnx


@pytest.fixture(scope="module")
def directory(llama, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def parsed(*flags: str) -> EngineConfig:
    def name_flags(engine: EngineFlags) -> None:
        """Name the flags."""

    return parse_words(name_flags, flags)["engine"]


def test_every_engine_option_is_a_documented_flag(capsys: pytest.CaptureFixture[str]) -> None:
    docs = read_attribute_docs(EngineConfig)
    assert set(docs) == set(EngineConfig.model_fields)
    assert main(["chat", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert docs["page_size"] in text
    assert all(f"--{name.replace('_', '-')}" in text for name in docs)


def test_command_flags_parse_to_typed_values() -> None:
    config = parsed("--max-model-len", "64", "--strict-context", "--extra-stops", "a,b")
    assert (config.max_model_len, config.strict_context, config.extra_stops) == (
        64,
        True,
        ("a", "b"),
    )
    assert parsed("--no-enable-prefix-caching").enable_prefix_caching is False
    assert parsed("--enable-prefix-caching").enable_prefix_caching is True
    buckets = parsed("--max-num-seqs", "4", "--max-num-seq-buckets", "1,2,4").max_num_seq_buckets
    assert buckets == (1, 2, 4)
    one = parsed("--max-num-seqs", "4", "--max-num-seq-buckets", "4", "--extra-stops", "a")
    assert (one.max_num_seq_buckets, one.extra_stops) == ((4,), ("a",))
    assert parsed("--max-num-seq-buckets", "null").max_num_seq_buckets is None
    assert [parse_value(text) for text in ("1.5", "null", "False", "left")] == [
        1.5,
        None,
        False,
        "left",
    ]
    with pytest.raises(ConfigError, match="--page-size: Input should be greater than 0"):
        parsed("--page-size", "0")
    with pytest.raises(ConfigError, match="reserve_tokens 9 leaves no room"):
        parsed("--reserve-tokens", "9", "--max-model-len", "8")


def test_help_shows_kinds_and_defaults_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    lines = capsys.readouterr().out
    titles = [line for line in lines.splitlines() if line.endswith(":") and line[0] != " "]
    groups = ["Arguments", "Model", "Engine", "Server", "Processes of one model", "Options"]
    assert titles == [f"{group}:" for group in groups]
    text = " ".join(lines.split())
    assert "Usage: esurge serve" in text
    assert "--max-model-len <int>" in text
    assert "[default: 8192]" in text
    assert "--scheduling-policy <fcfs|priority>" in text
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in text
    assert "--also <str>..." in text
    assert "--end-with-parent" not in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-tp", "2", "--sharding-axis-dims", "1,1,1,1,1"], "both set the mesh"),
        (["--tensor-parallel-size", "0"], "must be at least 1"),
        (["--lora-modules", "a=x", "a=y"], "needs different NAME=PATH entries, got 'a=y'"),
        (["--lora-modules", "x"], "needs different NAME=PATH entries, got 'x'"),
        (["--config", "absent.yaml"], "--config absent.yaml cannot be read"),
    ],
)
def test_wrong_flags_of_vllm_are_explained(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "nowhere", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "m", "--api-key", "hunter2"], "set the variable ESURGE_API_KEY"),
        (["serve", "m", "--api-key=hunter2"], "set the variable ESURGE_API_KEY"),
        (["serve", "m", "--admin-key", "hunter2"], "set the variable ESURGE_ADMIN_API_KEY"),
        (["serve", "m", "--api-key-fil", "hunter2"], "--api-key-file"),
        (["serve", "m", "--max-model", "hunter2"], "--max-model-len"),
        (["serve", "m", "--max-model-lem=hunter2"], "--max-model-len"),
        (["chat", "m", "--temprature", "hunter2"], "--temperature"),
        (["serv", "m"], "did you mean 'serve'"),
        (["bench", "--client", "hunter2"], "--clients"),
        (["serve", "m", "--host", "--port", "80"], "'--host' requires an argument"),
        (["serve", "m", "--host"], "'--host' requires an argument"),
        (["serve", "m", "--also", "--port", "80"], "'--also' requires an argument"),
        (["join"], "Missing argument 'HOST:PORT'"),
    ],
)
def test_unknown_flags_are_refused_with_a_near_name_and_without_their_value(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == BAD_INPUT
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out
    assert "hunter2" not in printed.err


def test_tensor_parallel_size_is_an_axis_of_the_mesh() -> None:
    assert parse_mesh_dims(None, 4) == (-1, 1, 1, 4, 1)
    assert parse_mesh_dims(None) == (1, 1, 1, -1, 1)
    assert parse_mesh_dims("1,2,1,1,1") == (1, 2, 1, 1, 1)


def test_config_file_contains_flags_and_the_command_line_takes_precedence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "max-model-len: 64\nenable_prefix_caching: false\nextra-stops: [a, b]\n"
        "enable-sleep-mode: true\nserved-model-name: [x, y]\n"
    )
    words = ["--config", str(file), "m", "--max-model-len", "32"]
    values = parse_words(serve.serve, words)
    options, server = values["engine"], values["server"]
    assert (options.max_model_len, options.enable_prefix_caching) == (32, False)
    assert options.extra_stops == ("a", "b")
    assert (server.enable_sleep_mode, server.served_model_name) == (True, ("x", "y"))
    assert parse_words(serve.serve, [*words, "--served-model-name", "z"])[
        "server"
    ].served_model_name == ("z",)
    file.write_text("max-model-lenn: 64\n")
    assert main(["serve", *words]) == BAD_INPUT
    assert "is no flag of this command; did you mean 'max-model-" in capsys.readouterr().err


_CACHE_IN_INT8 = '{"kv_cache_quantization_config": {"dtype": "int8"}}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "./nowhere"], "not there"),
        (["serve", "x", "--config-kwargs", "[1]"], "--config-kwargs is a JSON object"),
        (["serve", "x", "--sharding-axis-dims", "a"], "--sharding-axis-dims"),
        (["serve", "x", "--quantization", "quip"], "packed already (AWQ, GPTQ, "),
        (
            ["serve", "x", "-q", "nf4", "--config-kwargs", '{"bits": 4}'],
            "--quantization and bits of --config-kwargs both quantize the weights",
        ),
        (["serve", "x", "--config-kwargs", '{"bits": 3}'], "bits = 3"),
        (
            ["serve", "x", "--config-kwargs", '{"quantization_config": {"quant_method": "awq"}}'],
            "--quantization nf4",
        ),
        (
            ["serve", "x", "--kv-cache-dtype", "fp8", "--config-kwargs", _CACHE_IN_INT8],
            "--kv-cache-dtype and kv_cache_quantization_config of --config-kwargs",
        ),
        (["serve", "x", "--also", "y", "--served-model-name", "z"], "--served-model-name"),
        (["serve", "x", "--also", "x"], "the same name"),
        (["run-batch", "x", "-i", "./nowhere", "-o", "-"], "nowhere cannot be opened"),
        (["bench"], "give a MODEL"),
        (["bench", "--url", "http://127.0.0.1:9/v1"], "cannot be read"),
    ],
)
def test_invalid_command_line_prints_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == BAD_INPUT
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ") and message in line


def made(directory: Path, *flags: str) -> Any:
    """Return the engine of command-line flags."""
    words = [str(directory), "--max-num-seqs", "2", "--max-model-len", "64", "--page-size", "8"]
    return create_engine(parse_model_arguments([*words, "--no-compile-runner", *flags]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "formats"),
    [
        ([], set()),
        (["--quantization", "nf4"], {"nf4"}),
        (["-q", "bitsandbytes"], {"nf4"}),
        (["--quantization", "fp8"], {"fp8"}),
        (["--config-kwargs", '{"bits": 8}'], {"int8"}),
        (["--config-kwargs", '{"quantization_config": {"method": "4bit"}}'], {"int4"}),
    ],
    ids=str,
)
def test_quantization_flags_set_weight_formats(
    directory: Path, flags: list[str], formats: set[str]
) -> None:
    _, state = nnx.split(made(directory, *flags).loop.runner.model)
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, QArray))
    assert {leaf.format for leaf in leaves if isinstance(leaf, QArray)} == formats


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "formats"),
    [([], {"int8"}), (["-q", "none"], set()), (["-q", "nf4"], {"nf4"})],
    ids=str,
)
def test_gguf_file_is_served_with_its_codes(
    llama: Any, directory: Path, tmp_path: Path, flags: list[str], formats: set[str]
) -> None:
    path = llama.save_gguf(tmp_path / "model.gguf", tokenizer=str(directory), dtype="q8_0")
    engine = made(path, *flags)
    _, state = nnx.split(engine.loop.runner.model)
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, QArray))
    assert {leaf.format for leaf in leaves if isinstance(leaf, QArray)} == formats
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    assert len(engine.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("auto", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("fp8", "float8_e4m3fn")],
)
def test_kv_cache_dtype_is_the_dtype_of_the_pages(directory: Path, dtype: str, stored: str) -> None:
    engine = made(directory, "--kv-cache-dtype", dtype)
    largest = max(jax.tree.leaves(engine.loop.runner.memory.cache), key=lambda leaf: leaf.size)
    assert largest.dtype == stored


def test_chat_template_flag_replaces_the_template_of_the_tokenizer(
    directory: Path, tmp_path: Path
) -> None:
    text = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(text)
    for given in (text, str(tmp_path / "template.jinja")):
        values = parse_model_arguments([str(directory), "--chat-template", given])
        assert get_tokenizer(values).chat_template == text
    values = parse_model_arguments([str(directory), "--chat-template", "nowhere.jinja"])
    with pytest.raises(ConfigError, match=r"'nowhere.jinja' cannot be read"):
        get_tokenizer(values)


def test_conversation_keeps_messages_and_handles_commands(
    surge, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation(surge, SamplingParams(max_tokens=4, temperature=0.0), "be kind")
    talk.take("hi")
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    expected = surge.chat(asked, SamplingParams(max_tokens=4, temperature=0.0)).outputs[0].text
    assert capsys.readouterr().out == expected + "\n"
    assert talk.messages == [asked[1], {"role": "assistant", "content": expected}]
    talk.take("/undo")
    assert talk.messages == []
    talk.take("/nothing")
    assert "no such command" in capsys.readouterr().err
    talk.take("/system")
    assert talk.system is None


@pytest.mark.nightly
def test_chat_command_serves_model_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["hello", ""])

    def read(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    flags = ["--max-model-len", "64", "--page-size", "8", "--no-compile-runner"]
    assert main(["chat", str(directory), "--max-tokens", "3", *flags]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_bench_command_reports_load_figures(surge, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--clients", "1", "3", "--requests", "4", "--prompt-words", "5", "--max-tokens", "6"]
    with background(surge) as url:
        assert main(["bench", "--url", url, "--json", *load]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["clients"], row["requests"], row["errors"]) for row in rows] == [
        (1, 4, 0),
        (3, 4, 0),
    ]
    for row in rows:
        assert row["tokens"] == 6
        assert 0 < row["ttft_p50_ms"] <= row["e2e_p50_ms"] <= row["e2e_p99_ms"]


def test_bench_figures_compute_percentiles_and_count_errors() -> None:
    assert [nearest_percentile([3.0, 1.0, 2.0, 4.0], share) for share in (50, 90, 99)] == [
        2.0,
        4.0,
        4.0,
    ]
    good = RequestTiming(10.0, [10.5, 10.7, 11.1], prompt_tokens=7, tokens=3)
    row = compute_figures(1, [good, RequestTiming(10.0, error="500")], 2.0)
    assert (row["errors"], row["tokens_per_second"], row["prompt_tokens"]) == (1, 1.5, 7)
    assert row["ttft_p50_ms"] == pytest.approx(500)
    assert row["itl_p99_ms"] == pytest.approx(400)
    with pytest.raises(EasyDeLError, match="the first failed so: 500"):
        compute_figures(1, [RequestTiming(10.0, error="500")], 1.0)


@pytest.mark.nightly
def test_serve_command_answers_requests(directory: Path) -> None:
    flags = "--max-model-len 64 --page-size 8 --max-num-seqs 4"
    load = ["--clients", "2", "--requests", "4", "--prompt-words", "5", "--max-tokens", "6"]
    command = [sys.executable, "-m", "ed_esurge", "bench", str(directory), "--json", *load]
    done = subprocess.run(
        [*command, "--serve-flags", flags], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["errors"] == 0


@pytest.mark.nightly
def test_run_batch_command_writes_one_result_per_line(directory: Path, tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n{\n")
    flags = ["--max-model-len", "64", "--page-size", "8", "--max-num-seqs", "2"]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", str(directory), *files, *flags]) == 0
    good, bad = [json.loads(row) for row in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert good["response"]["body"]["usage"]["completion_tokens"] == 4
    assert bad["error"]["code"] == "invalid_json"


@pytest.mark.nightly
def test_model_of_the_command_line_has_the_facts_of_its_files(directory: Path) -> None:
    """Clients of Ollama read the family, the size and the length of the context."""
    with background(made(directory), served_model_name="m") as url:
        client = ollama.Client(host=url.removesuffix("/v1"))
        shown, (tag,) = client.show("m"), client.list().models
    info = shown.modelinfo
    assert info["general.architecture"] == shown.details.family == "llama"
    config = json.loads((directory / "config.json").read_text())
    assert info["llama.context_length"] == config["max_position_embeddings"]
    assert info["llama.embedding_length"] == config["hidden_size"]
    assert shown.details.format == "safetensors" and shown.details.quantization_level == "F32"
    assert tag.size == sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert tag.details == shown.details
    assert tag.details.parameter_size.endswith("K")


def test_serve_command_accepts_two_models(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    flags = ["--max-model-len", "64", "--page-size", "8", "--no-compile-runner"]
    values = parse_words(serve.serve, [str(directory), "--also", str(other), *flags])
    arguments = values["loading"].replace(model=values["model"], engine=values["engine"])
    engines = serve.create_engines(arguments, values["server"])
    assert list(engines) == [directory.name, "other"]
    with background(engines) as url:
        for name in engines:
            body = {"prompt": "hello", "max_tokens": 3, "model": name}
            answer = httpx.post(f"{url}/completions", json=body, timeout=120).json()
            assert answer["model"] == name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_the_common_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: esurge {command} [OPTIONS]" in text
    has_result = command in ("serve", "run-batch", "bench", "bench-serve")
    assert [flag in text for flag in ("--quiet", "--json")] == [has_result, has_result]


def test_help_of_serve_imports_no_library_of_the_server() -> None:
    heavy = {"jax", "flax", "starlette", "uvicorn", "transformers", "httpx", "numpy"}
    code = (
        "import sys\nfrom ed_esurge.command.main import main\n"
        f"assert main(['serve', '--help']) == 0\nprint(sorted({heavy!r} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--max-model-len" in done.stdout


def test_shell_completes_commands_flags_and_choices() -> None:
    code = (
        "import os, sys\nfrom ed_esurge.command.main import main\n"
        "for words in ('esurge se', 'esurge serve --max-mod', 'esurge serve m --dtype b'):\n"
        "    os.environ.update(_ESURGE_COMPLETE='complete_bash', COMP_WORDS=words,\n"
        "                      COMP_CWORD=str(words.count(' ')))\n"
        "    main()\nprint('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["serve", "--max-model-len", "bfloat16", "False"]


def test_errors_with_json_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["bench", "--json"], "give a MODEL"),
        (["bench", "--json", "--clientz", "1"], "No such option: --clientz"),
        (["bench", "serve", "--json", "--url", "x", "--num-prompts", "0"], "--num-prompts 0"),
        (["run-batch", "x", "-i", "-", "-o", "-", "--json"], "keep one"),
    ):
        assert main(words) == BAD_INPUT
        printed = capsys.readouterr()
        assert message in json.loads(printed.out)["error"] and not printed.err


def test_folder_of_a_run_is_served_by_the_name_of_the_run(directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(directory, folder / "model")
    assert hub.resolve(folder) == folder / "model"
    for path in (folder, folder / "model", folder / "adapter"):
        path.mkdir(exist_ok=True)
        assert get_model_name(str(path)) == "mine"
    assert get_model_name("org/model") == "org/model"
    assert get_model_name("package:weights/model/tiny.gguf#sha256=0") == "tiny.gguf"
    assert find_adapter(hub.resolve(folder)) is None


def write_adapter(folder: Path, **settings: object) -> None:
    folder.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": 2, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(values))


def test_adapter_names_its_base(directory: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "run" / "adapter", base_model_name_or_path=str(directory))
    for folder in (tmp_path / "run", tmp_path / "run" / "adapter"):
        adapter = find_adapter(hub.resolve(folder))
        assert adapter is not None
        assert (adapter.path.name, adapter.resolve_base()) == ("adapter", directory)
    write_adapter(tmp_path / "lost", base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(EasyDeLError, match=r"names the base model .*gone.* elarge merge BASE"):
        served_engine(parse_model_arguments([str(tmp_path / "lost")]))
    write_adapter(tmp_path / "none")
    with pytest.raises(ConfigError, match="names no base model"):
        find_adapter(tmp_path / "none")


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(), ("-q", "int8")], ids=str)
def test_adapter_folder_answers_as_the_adapter_on_its_base(
    llama, directory: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    base = hub.from_pretrained(str(directory))
    adapted = base.apply_lora_to_layers(2)
    values = {
        path: jax.random.normal(jax.random.key(1), one.get_value().shape)
        for path, one in nnx.to_flat_state(nnx.state(adapted))
        if path[-1] == "lora_b"
    }
    for path, one in nnx.to_flat_state(nnx.state(adapted)):
        if path in values:
            one.set_value(values[path])
    adapted.save_pretrained(tmp_path / "run" / "adapter")
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    with made(tmp_path / "run", *flags) as engine:
        tokens = engine.generate("hello", greedy)[0].outputs[0].token_ids
        assert engine.model_name == "run"
    with made(directory, *flags) as engine:
        assert engine.generate("hello", greedy)[0].outputs[0].token_ids != tokens
    if not flags:
        adapted.unwrap_lora_to_layers().save_pretrained(tmp_path / "merged")
        with made(tmp_path / "merged") as engine:
            assert engine.generate("hello", greedy)[0].outputs[0].token_ids == tokens


@pytest.mark.parametrize("command", ["serve", "chat", "run-batch", "bench-serve"])
def test_flags_of_a_file_without_an_effect_are_printed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("enforce-eager: true\n")
    model = ["--url", "http://127.0.0.1:9/v1"] if command == "bench-serve" else ["no model"]
    files = ["-i", "-", "-o", "-"] if command == "run-batch" else []
    assert main([command, *model, "--config", str(file), *files]) == BAD_INPUT
    assert "flags without an effect here: --enforce-eager (has no" in capsys.readouterr().err
