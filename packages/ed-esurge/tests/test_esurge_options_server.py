"""Options of the server: one record is the source of keywords, flags and their checks."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
from ed_esurge.command import serve
from ed_esurge.command.load import ModelArguments
from ed_esurge.command.main import main
from ed_esurge.command.nodes import NodeOptions
from ed_esurge.command.program import build_command, parse_words
from ed_esurge.config import ApiKey, EngineConfig, ServerLimits
from ed_esurge.server import ServerOptions, create_app
from ed_esurge.server.launch import background
from ed_esurge.server.options import AppOptions, ListenOptions
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError, KeywordError

#: Flag of `esurge serve` that is no option of the server -> the reason.
OTHER_FLAGS = {
    "nnodes": "processes of one model; `elarge launch` starts those of a run file",
    "node_rank": "as `nnodes`",
    "master_addr": "as `nnodes`",
    "master_port": "as `nnodes`",
    "end_with_parent": "the first process sets it for the processes that it starts",
}


def build(*words: str) -> ServerOptions:
    return parse_words(serve.serve, ["m", *words])["server"]


def test_each_server_option_is_a_flag() -> None:
    command = build_command(serve.serve, lambda work: 0, has_result=False)
    flags = inspect.signature(command).parameters.keys()
    assert ServerOptions.model_fields.keys() <= flags
    others = {"ctx", "model", "config"} | ModelArguments.model_fields.keys()
    others |= EngineConfig.model_fields.keys() | NodeOptions.model_fields.keys()
    assert flags <= ServerOptions.model_fields.keys() | others
    assert NodeOptions.model_fields.keys() == OTHER_FLAGS.keys()
    assert set(serve.OMITTED) == {"api_key", "admin_api_key", "chat_template"}
    assert "chat_template" in ModelArguments.model_fields


def test_flags_have_the_defaults_of_the_record() -> None:
    assert build() == ServerOptions()


def test_flags_of_all_types_set_the_record(tmp_path: Path) -> None:
    words = ["--served-model-name", "a", "b", "--port", "0", "--no-enable-function-calling"]
    words += ["--unknown-fields", "refuse", "--limits", '{"max_files": 3}', "-dp", "2"]
    words += ["--lora-modules", "x=/a=b", "y=/c", "--share-prefix-cache", "--keep-alive", "-1"]
    assert build(*words) == ServerOptions(
        served_model_name=("a", "b"),
        port=0,
        enable_function_calling=False,
        unknown_fields="refuse",
        limits=ServerLimits(max_files=3),
        data_parallel_size=2,
        lora_modules={"x": "/a=b", "y": "/c"},
        share_prefix_cache=True,
        keep_alive="-1",
    )
    values = build("--model-dir", str(tmp_path), "--model-memory", "1.5")
    assert (values.model_directory, values.model_memory) == (str(tmp_path), 1.5)
    assert build("--model-directory", "d").model_directory == "d"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--also", "a", "b"], ("a", "b")),
        (["--also", "a", "--port", "80", "--also", "b"], ("a", "b")),
        (["--also=a", "--also=b"], ("a", "b")),
        (["--also", "a", "-1"], ("a", "-1")),
        (["--also", "a", "--", "m"], ("a",)),
    ],
)
def test_words_and_repeated_flags_are_several_values(
    words: list[str], names: tuple[str, ...]
) -> None:
    words = words if "--" in words else ["m", *words]
    values = parse_words(serve.serve, words)
    assert (values["server"].also, values["model"]) == (names, "m")


def test_values_and_short_flags_have_the_forms_of_vllm() -> None:
    words = ["-tp", "2", "-q=nf4", "--port=80", "--keep-alive", "-1", "-dp", "3", "--host", "a b"]
    values = parse_words(serve.serve, [*words, "m", "--port", "81", "--seed", "5"])
    assert (values["loading"].tensor_parallel_size, values["loading"].quantization) == (2, "nf4")
    server = values["server"]
    assert (server.port, server.keep_alive, server.data_parallel_size) == (81, "-1", 3)
    assert values["engine"].seed == 5 and values["engine"].compile_in_background


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "65536"], "--port: "),
        (["--ssl-keyfile", "a"], "TLS needs both --ssl-keyfile and --ssl-certfile"),
        (["--model-memory", "1"], "--model-memory requires --model-directory"),
        (["--model-dir", "d", "--model-memory", "0"], "--model-memory: "),
        (["--keep-alive", "soon"], "--keep-alive: 'soon' is no duration"),
        (["--log-level", "wraning"], "did you mean 'warning'"),
        (
            ["--also", "x", "--lora-modules", "a=b"],
            "--lora-modules requires one model: leave --also",
        ),
        (["--also", "x", "--served-model-name", "a"], "--served-model-name requires one model"),
        (["-dp", "0"], "--data-parallel-size: "),
        (
            ["-dp", "2", "--data-parallel-size-local", "3"],
            "must be from 0 to --data-parallel-size 2",
        ),
        (
            ["-dp", "2", "--model-dir", "d"],
            "further models with --also instead of --model-directory",
        ),
        (["--require-api-key"], "--require-api-key needs"),
    ],
)
def test_messages_name_the_flags(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "nowhere", *words]) == 2
    assert message in capsys.readouterr().err


def test_command_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"esurge {version('ed-esurge')}\n"


def test_keywords_and_record_give_equal_applications() -> None:
    options = ServerOptions(unknown_fields="refuse", enable_sleep_mode=True, port=80)
    for app in (
        create_app(ScriptedEngine(), options),
        create_app(ScriptedEngine(), unknown_fields="refuse", enable_sleep_mode=True),
        create_app(
            ScriptedEngine(), options.replace(enable_sleep_mode=False), enable_sleep_mode=True
        ),
    ):
        state = app.state.server.state
        assert (state.unknown_fields.policy, state.enable_sleep_mode) == ("refuse", True)
        assert type(state.options) is AppOptions


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("unknown_field", "did you mean 'unknown_fields'"),
        ("port", "no keyword 'port'"),
        ("also", "known: "),
    ],
)
def test_unknown_keyword_is_refused_with_a_suggestion(keyword: str, hint: str) -> None:
    with pytest.raises(KeywordError, match=hint):
        create_app(ScriptedEngine(), **{keyword: "x"})


def test_serve_refuses_options_that_only_commands_execute() -> None:
    with pytest.raises(KeywordError, match="background has no keyword 'also'"):
        background(ScriptedEngine(), also=["x"]).__enter__()


def test_folder_of_models_requires_a_way_to_load_them() -> None:
    with pytest.raises(ConfigError, match="does not state how models are loaded"):
        create_app(ScriptedEngine(), model_directory="models")


def test_keywords_have_the_bounds_of_the_record() -> None:
    with pytest.raises(ConfigError, match=r"limits.max_files: .*greater than 0"):
        create_app(ScriptedEngine(), limits={"max_files": 0})
    with pytest.raises(ConfigError, match=r"port: .*less than or equal to 65535"):
        background(ScriptedEngine(), port=65536).__enter__()


def test_keys_are_texts_digests_and_files(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(f"[{ApiKey.of('c').model_dump_json(exclude_unset=True)}]")
    keywords = {"api_key": ["a", ApiKey.of("b")], "api_key_file": tmp_path / "keys.json"}
    app = create_app(ScriptedEngine(), admin_api_key="d", **keywords)
    assert {key.sha256 for key in app.state.server.state.keys} == {
        ApiKey.of(key).sha256 for key in "abcd"
    }


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(ListenOptions.model_validate({"api_key": "hunter2"}))
