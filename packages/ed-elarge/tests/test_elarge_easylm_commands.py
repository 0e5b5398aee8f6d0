"""EasyLM's commands: its published flags, conversions, training, serving and measurements."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_elarge.config.normalize import normalize
from ed_elarge.easylm import blockwise, jax_utils, llama, serving, training
from ed_elarge.easylm.commands import WORK, run_command
from ed_elarge.easylm.flags import EASYLM_COMMANDS, Flag, parse_flags
from ed_elarge.easylm.measuring import ServedLM, wait_for_server
from ed_elarge.easylm.rows import TextFields
from ed_elarge.errors import Document
from ed_elarge.evaluation.prompts import find_question
from ed_infra.errors import CheckpointError, ConfigError
from ed_trainers.compare import differences
from ed_trainers.easylm import TreeFile, open_arrays
from ed_trainers.optimizers.schedules import build_schedule
from jax.sharding import PartitionSpec

MODULES = {
    **{
        name: f"EasyLM.models.llama.{name}"
        for name in EASYLM_COMMANDS
        if name.startswith("llama_") or name.endswith(("to_hf", "to_easylm"))
    },
    **{
        name: f"EasyLM.scripts.{name}"
        for name in EASYLM_COMMANDS
        if name.startswith(("lm_eval", "benchmark", "diff")) or name == "convert_checkpoint"
    },
}


def run(name: str, *flags: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_command(name, flags)
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def stream(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "streaming_params"
    flags = f"--checkpoint_dir={quickstart_model}", f"--output_file={path}", "--streaming"
    assert run("convert_hf_to_easylm", *flags) == 0
    return path


# Flags.


@pytest.mark.parametrize("name", EASYLM_COMMANDS)
def test_each_command_is_a_module_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(MODULES) == set(WORK) == set(EASYLM_COMMANDS)
    main = importlib.import_module(MODULES[name]).main
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert all(f"--{flag}" in capsys.readouterr().out for flag in list(EASYLM_COMMANDS[name])[:1])


@pytest.mark.parametrize("name", EASYLM_COMMANDS)
def test_each_flag_accepts_the_default_of_easylm_and_is_read_in_both_spellings(name: str) -> None:
    table = EASYLM_COMMANDS[name]
    words: list[str] = []
    for number, (flag, entry) in enumerate(table.items()):
        default = entry.default if isinstance(entry, Flag) else entry
        words += [f"--{flag}", str(default)] if number % 2 else [f"--{flag}={default}"]
    values = parse_flags(name, words)
    own = {flag: entry for flag, entry in table.items() if not isinstance(entry, Flag)}
    assert values == own == parse_flags(name, [])
    assert values.explicit_names == set(table)


def test_flags_convert_their_values_by_the_default() -> None:
    words = ["--total_steps=7", "--optimizer.adamw_optimizer.lr", "3e-4", "--logger.online"]
    words += ["--notrain_dataset.text_processor.add_bos_token", "--llama.rms_norm_eps=1e-5"]
    values = parse_flags("llama_train", words)
    assert values["total_steps"] == 7 and values["optimizer.adamw_optimizer.lr"] == 3e-4
    assert values["logger.online"] is True and values["llama.rms_norm_eps"] == 1e-5
    assert values["train_dataset.text_processor.add_bos_token"] is False
    assert values["eval_dataset.text_processor.add_bos_token"] is True


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--load_chekpoint=a", "did you mean 'load_checkpoint'"),
        ("--total_steps=many", "--total_steps=many must be an integer"),
        ("--optimizer.adamw_optimizer.lr=fast", "must be a number"),
        ("--logger.online=perhaps", "must be true or false"),
        ("--llama.resid_pdrop=0.1", "only 0.0 is possible here; .*attn_pdrop"),
        ("--load_dataset_state=data.pkl", "only '' is possible here; a run continues"),
        ("word", "unknown flag --word"),
    ],
)
def test_invalid_flags_are_errors_that_name_the_flag(flag: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_flags("llama_train", [flag])


def test_a_flag_without_effect_prints_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    parse_flags("llama_train", ["--checkpointer.save_optimizer_state=True"])
    expected = "--checkpointer.save_optimizer_state has no effect: checkpoints always contain it\n"
    assert capsys.readouterr().err == expected


# Configurations of LLaMA.


@pytest.mark.parametrize(
    ("name", "layers"), [("7b", 32), ("13B", 40), ("llama_30b", 60), ("llama3_8b", 32)]
)
def test_standard_configurations_have_their_sizes(name: str, layers: int) -> None:
    fields = llama.read_fields(parse_flags("llama_train", [f"--load_llama_config={name}"]))
    assert llama.get_llama_fields(fields or {})["num_hidden_layers"] == layers


def test_configuration_is_read_from_json_and_updated_without_executing_code(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"hidden_size": 64, "max_position_embeddings": 99, "junk": 1}))
    words = [f"--load_llama_config=json::{file}", "--llama.num_hidden_layers=3"]
    update = "dict(num_attention_heads=4, remat_block='')"
    for text in (update, "{'num_attention_heads': 4, 'remat_block': ''}"):
        flags = parse_flags("llama_train", [*words, f"--update_llama_config={text}"])
        fields = llama.read_fields(flags)
        assert fields is not None
        config = llama.get_llama_fields(fields)
        assert config["hidden_size"] == 64 and config["num_hidden_layers"] == 3
        assert config["max_position_embeddings"] == 99 and config["num_key_value_heads"] == 4
        assert not any(name.startswith(("remat", "scan", "fcm")) for name in config)
        assert llama.execution(fields) == {"gradient_checkpointing": ""}
    for words, message in [
        (["--update_llama_config=__import__('os').abort()"], "is no dictionary of Python values"),
        (["--update_llama_config={'hiden_size': 1}"], "did you mean 'hidden_size'"),
        (["--load_llama_config=pickle::a.pkl"], "pickled files are not read"),
        (["--load_llama_config=7c"], "did you mean '7b'"),
        ([f"--load_llama_config=json::{tmp_path}/none"], "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=message):
            llama.read_fields(parse_flags("llama_train", words))
    with pytest.raises(ConfigError, match=r"embd_pdrop=0.1: only 0.0"):
        llama.execution({"embd_pdrop": 0.1})
    chunks = llama.execution({"scan_attention": True, "scan_query_chunk_size": 8, "scan_mlp": True})
    assert chunks["attn_mechanism"] == "blockwise" and chunks["blocksize_q"] == 8
    assert chunks["use_scan_mlp"] is True and chunks["scan_mlp_chunk_size"] == 1024


# Conversions.


@pytest.mark.parametrize("kind", ["params", "flax_params"])
def test_conversions_there_and_back_change_nothing(
    kind: str, quickstart_model: Path, stream: Path, tmp_path: Path
) -> None:
    source = stream
    if kind == "flax_params":
        source = tmp_path / "flax"
        words = f"--load_checkpoint=params::{stream}", f"--output_file={source}"
        assert run("convert_checkpoint", *words, "--float_dtype=fp32") == 0
        assert isinstance(open_arrays(source), TreeFile)
    back = tmp_path / "back"
    words = f"--load_checkpoint={kind}::{source}", f"--output_dir={back}", "--dtype=fp32"
    config = f"--load_llama_config=json::{quickstart_model}/config.json"
    assert run("convert_easylm_to_hf", *words, config, f"--tokenizer_path={quickstart_model}") == 0
    assert list(differences(quickstart_model, back)) == []
    tokenizer = (back / "tokenizer.json").read_bytes()
    assert tokenizer == (quickstart_model / "tokenizer.json").read_bytes()


def test_convert_checkpoint_writes_the_dtype(stream: Path, tmp_path: Path) -> None:
    target = tmp_path / "half"
    words = f"--load_checkpoint=params::{stream}", f"--output_file={target}", "--streaming=True"
    assert run("convert_checkpoint", *words) == 0
    assert {record.dtype for record in open_arrays(target).values()} == {jnp.dtype("bfloat16")}
    assert run("convert_checkpoint", *words, "--float_dtype=bf8") == 2


def test_difference_of_checkpoints_recovers_the_target(stream: Path, tmp_path: Path) -> None:
    from ed_trainers.easylm import write_stream

    arrays = open_arrays(stream)
    target = tmp_path / "target"
    write_stream(target, ((name, arrays.read(name) * 2) for name in arrays))
    words = f"--load_base_checkpoint=params::{stream}", "--float_dtype=fp32"
    delta, again = tmp_path / "delta", tmp_path / "again"
    assert (
        run(
            "diff_checkpoint",
            *words,
            f"--load_target_checkpoint=params::{target}",
            f"--output_file={delta}",
        )
        == 0
    )
    assert list(differences(stream, delta)) == []
    assert (
        run(
            "diff_checkpoint",
            *words,
            f"--load_target_checkpoint=params::{delta}",
            f"--output_file={again}",
            "--recover_diff",
            "--streaming=False",
        )
        == 0
    )
    assert list(differences(target, again)) == []


def test_conversions_report_missing_flags_and_files(
    stream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent"
    for name, words, message in [
        ("convert_hf_to_easylm", [f"--output_file={absent}"], "--checkpoint_dir is missing"),
        (
            "convert_easylm_to_hf",
            [f"--load_checkpoint=params::{stream}"],
            "--output_dir is missing",
        ),
        (
            "convert_checkpoint",
            [f"--load_checkpoint=params::{absent}", f"--output_file={tmp_path}/a"],
            "is not a file",
        ),
        ("diff_checkpoint", [], "--load_base_checkpoint is missing"),
    ]:
        assert run(name, *words) == 2
        assert message in capsys.readouterr().err
    other = tmp_path / "other"
    from ed_trainers.easylm import write_stream

    write_stream(other, [("lm_head/kernel", np.ones((2, 2), np.float32))])
    words = [f"--load_base_checkpoint=params::{stream}", f"--output_file={absent}"]
    assert run("diff_checkpoint", *words, f"--load_target_checkpoint=params::{other}") == 2
    assert "lm_head/kernel has the shapes" in capsys.readouterr().err
    assert not absent.exists()
    with pytest.raises(CheckpointError, match="is not a file"):
        list(training.checkpoints.read_parameters(f"params::{absent}"))


# Training.


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    texts = [{"prompt": f"Question {n}?", "completion": f"Answer {n}."} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return path


def train_words(rows: Path, stream: Path, model: Path, out: Path) -> list[str]:
    return [
        "--mesh_dim=1,-1,1",
        "--dtype=fp32",
        f"--load_checkpoint=params::{stream}",
        f"--load_llama_config=json::{model}/config.json",
        f"--tokenizer.vocab_file={model}/tokenizer.json",
        "--train_dataset.type=json",
        f"--train_dataset.json_dataset.path={rows}",
        "--train_dataset.json_dataset.seq_length=32",
        "--train_dataset.json_dataset.batch_size=8",
        "--train_dataset.text_processor.fields=[prompt],completion",
        "--optimizer.type=adamw",
        "--optimizer.adamw_optimizer.lr=1e-3",
        "--optimizer.adamw_optimizer.lr_warmup_steps=1",
        "--optimizer.adamw_optimizer.lr_decay_steps=8",
        "--total_steps=4",
        "--log_freq=1",
        "--save_model_freq=4",
        "--checkpointer.float_dtype=fp32",
        f"--logger.output_dir={out}",
    ]


def test_flags_of_training_become_a_valid_run_file(
    rows: Path, stream: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    words = train_words(rows, stream, quickstart_model, tmp_path / "out")
    more = ["--optimizer.accumulate_gradient_steps=2", "--save_milestone_freq=6"]
    flags = parse_flags(
        "llama_train",
        [
            *words,
            *more,
            "--total_steps=16",
            "--eval_steps=2",
            "--eval_dataset.type=json",
            f"--eval_dataset.json_dataset.path={rows}",
            "--eval_dataset.text_processor.fields=completion",
        ],
    )
    document = training.build_run_file(flags, tmp_path / "out")
    config = normalize(Document("llama_train", value=document))
    trainer, mixture = config.trainer, config.mixture
    assert trainer is not None and mixture is not None
    assert (trainer.total_batch_size, trainer.gradient_accumulation_steps) == (16, 2)
    assert (trainer.max_training_steps, trainer.save_steps, trainer.log_steps) == (8, 1, 1)
    assert trainer.save_total_limit is None and trainer.clip_grad == 1.0
    assert config.sharding.axis_dims == (1, -1, 1, 1, 1)
    assert mixture.pack_seq_length == 32 and mixture.pack_strategy == "wrapped"
    assert mixture.eval_informs[0].content_field == "completion"
    assert mixture.eval_informs[0].num_rows == 16
    assert list(differences(quickstart_model, tmp_path / "out" / training.LOADED)) == []
    assert not find_question(config)
    # The schedule is that of optax, whose steps begin at 0.
    own = build_schedule(trainer, 8)
    reference = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 1, 8, 1e-3)
    assert [float(own(step)) for step in range(1, 8)] == pytest.approx(
        [float(reference(step)) for step in range(1, 8)], rel=1e-5
    )


def test_learning_rate_decays_until_decay_steps_as_in_optax(
    rows: Path, stream: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    words = train_words(rows, stream, quickstart_model, tmp_path / "out")
    flags = parse_flags(
        "llama_train",
        [
            *words,
            "--total_steps=30",
            "--optimizer.adamw_optimizer.lr_decay_steps=20",
            "--optimizer.adamw_optimizer.end_lr=1e-4",
        ],
    )
    trainer = normalize(
        Document("llama_train", value=training.build_run_file(flags, tmp_path / "out"))
    ).trainer
    assert trainer is not None
    own = build_schedule(trainer, 30)
    reference = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 1, 20, 1e-4)
    assert [float(own(step)) for step in range(1, 30)] == pytest.approx(
        [float(reference(step)) for step in range(1, 30)], rel=1e-5
    )


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("1,-1,1", [1, -1, 1, 1, 1]),
        ("!2,1,4", [2, 1, 1, 4, 1]),
        ("mp:2,dp:1,fsdp:-1", [1, -1, 1, 2, 1]),
    ],
)
def test_mesh_dim_becomes_axis_dims(text: str, dims: list[int]) -> None:
    assert training.parse_mesh(text) == dims


@pytest.mark.parametrize("text", ["1,1", "a,b,c", "dp:1,fsdp:1,tp:1", "dp:1,dp:1,mp:1"])
def test_mesh_dim_of_other_axes_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="three numbers of devices"):
        training.parse_mesh(text)


def fields(model: Path, **changes: Any) -> TextFields:
    given = {
        "fields": "[prompt],completion",
        "fields_from_example": "",
        "separator": " ",
        "prepend_text": "",
        "token_dtype": "i4",
        "add_bos_token": False,
        "add_special_tokens": False,
        "tokenizer": str(model),
    }
    return TextFields(**{**given, **changes})


def test_fields_become_tokens_with_and_without_loss(quickstart_model: Path) -> None:
    import base64

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(quickstart_model)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    ids = base64.b64encode(np.array([3, 4], "i4").tobytes()).decode()
    row = {"prompt": "One", "more": "two", "completion": "three", "ids": ids, "parts": "completion"}
    out = fields(quickstart_model)(row)
    assert out == {"prompt": encode("One"), "completion": encode("three")}
    out = fields(quickstart_model, fields="[prompt+more],<|7|>,{ids},completion")(row)
    assert out["prompt"] == encode("One two")
    assert out["completion"] == [7, 3, 4, *encode("three")]
    out = fields(quickstart_model, fields="", fields_from_example="parts", prepend_text="So ")(row)
    assert out == {"prompt": [], "completion": encode("So three")}
    with pytest.raises(ConfigError, match="the field 'absent' must be a text"):
        fields(quickstart_model, fields="absent")(row)
    for order in ("completion,[prompt]", "[prompt]", "prompt,[more],completion"):
        with pytest.raises(ConfigError, match="parts in brackets come first"):
            fields(quickstart_model, fields=order)


@pytest.mark.nightly
def test_llama_train_trains_like_a_run_file_and_writes_a_stream(
    rows: Path, stream: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = train_words(rows, stream, quickstart_model, out)
    done = subprocess.run(
        [sys.executable, "-m", MODULES["llama_train"], *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert str(out / "streaming_params") in done.stdout
    assert len(list(differences(stream, out / "streaming_params"))) > 5
    back = tmp_path / "back"
    words = f"--load_checkpoint=params::{out}/streaming_params", f"--output_dir={back}"
    config = f"--load_llama_config=json::{quickstart_model}/config.json"
    assert run("convert_easylm_to_hf", *words, config, "--dtype=fp32") == 0
    assert list(differences(out / "model", back)) == []
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("step", 0) for line in lines) == 4


# Serving and measuring.


def test_flags_of_serving_become_valid_sections(
    stream: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    words = [f"--load_checkpoint=params::{stream}", "--mesh_dim=1,1,-1", "--seq_length=64"]
    words += [f"--load_llama_config=json::{quickstart_model}/config.json", "--dtype=fp32"]
    words += [f"--tokenizer={quickstart_model}", "--lm_server.batch_size=2"]
    sections = serving.build_sections(parse_flags("llama_serve", words), tmp_path)
    config = normalize(Document("llama_serve", value=sections))
    assert (config.esurge.max_model_len, config.esurge.max_num_seqs) == (64, 2)
    assert config.sharding.axis_dims == (1, 1, 1, -1, 1)
    assert list(differences(quickstart_model, tmp_path / training.LOADED)) == []
    words = [f"--load_checkpoint={quickstart_model}", "--load_llama_config=7b"]
    flags = parse_flags("llama_serve", words)
    with pytest.raises(ConfigError, match=r"has its own config\.json"):
        serving.build_sections(flags, tmp_path)


@pytest.mark.nightly
def test_llama_serve_answers_the_requests_of_lm_eval_json(
    stream: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [f"--load_checkpoint=params::{stream}", f"--tokenizer={quickstart_model}"]
    words += [f"--load_llama_config=json::{quickstart_model}/config.json", "--mesh_dim=1,1,1"]
    words += ["--dtype=fp32", "--seq_length=64", f"--lm_server.port={port}"]
    server = subprocess.Popen([sys.executable, "-m", MODULES["llama_serve"], *words])
    try:
        wait_for_server(f"http://127.0.0.1:{port}", seconds=300)
        (tmp_path / "in.json").write_text(json.dumps({"prefix": ["a"], "text": [" b"]}))
        words = [f"--input={tmp_path}/in.json", f"--output={tmp_path}/out.json"]
        assert run("lm_eval_json", *words, f"--lm_client.url=http://127.0.0.1:{port}") == 0
    finally:
        server.terminate()
        server.wait(60)
    answers = json.loads((tmp_path / "out.json").read_text())
    assert answers["loglikelihood"][0] < 0 and answers["is_greedy"][0] in (True, False)


@pytest.mark.nightly
def test_benchmark_attention_prints_both_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--embed_dim=16", "--n_heads=2", "--ref_attn_seq_len=32", "--eff_attn_seq_len=64"]
    words += ["--query_chunk_size=16", "--key_chunk_size=16", "--warmup_steps=0", "--steps=1"]
    assert run("benchmark_attention", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "Reference attention",
        "Efficient attention",
        "Efficiency",
    ]
    assert run("benchmark_attention", "--embed_dim=15", "--n_heads=2") == 2
    assert run("benchmark_attention", "--steps=0") == 2


def test_served_model_answers_the_requests_of_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.instance import Instance

    sent: list[tuple[str, dict[str, Any]]] = []

    def answer(data: dict[str, Any], kind: str, url: str, size: int) -> dict[str, Any]:
        sent.append((kind, data))
        count = len(next(iter(data.values())))
        return {
            "loglikelihood": [-1.0] * count,
            "is_greedy": [True] * count,
            "output_text": ["x"] * count,
        }

    monkeypatch.setattr("ed_elarge.easylm.measuring.evaluate_files", answer)
    model = ServedLM("http://127.0.0.1:1")
    pairs = [Instance("loglikelihood", {}, ("a", "b"), 0)]
    assert model.loglikelihood(pairs) == [(-1.0, True)]
    assert model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a",), 0)]) == [-1.0]
    stops = [Instance("generate_until", {}, ("a", {"until": "."}), 0)]
    assert model.generate_until(stops) == ["x"]
    assert sent == [
        ("loglikelihood", {"prefix": ["a"], "text": ["b"]}),
        ("loglikelihood_rolling", {"text": ["a"]}),
        ("greedy_until", {"prefix": ["a"], "until": [["."]]}),
    ]
    with pytest.raises(ConfigError, match="cannot be reached"):
        wait_for_server("http://127.0.0.1:1", seconds=0)


# Functions.


@pytest.mark.daily("9-False")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [12, 9])
def test_blockwise_attention_equals_full_attention(causal: bool, keys: int) -> None:
    from EasyLM.bpt import blockwise_attn

    parts = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (2, length, 3, 4))
        for key, length in zip(parts, (12, keys, keys), strict=False)
    )
    bias = jax.random.normal(parts[3], (1, 3, 12, keys))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / 2 + bias
    if causal:
        scores = jnp.where(jnp.arange(12)[:, None] >= jnp.arange(keys), scores, -jnp.inf)
    expected = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)
    out = blockwise_attn(q, k, v, bias, causal=causal, query_chunk_size=4, key_chunk_size=4)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    with pytest.raises(ConfigError, match="needs dropout_rng"):
        blockwise_attn(q, k, v, deterministic=False, attn_pdrop=0.1)


def test_blockwise_feed_forward_equals_the_whole_layer() -> None:
    inputs = jax.random.normal(jax.random.key(0), (2, 10, 4))
    weight = jax.random.normal(jax.random.key(1), (4, 3))

    def layer(x: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ weight)

    for size in (1, 4, 10, 16):
        out = blockwise.blockwise_ffn(layer, inputs, size)
        np.testing.assert_allclose(out, layer(inputs), atol=1e-6)


def test_jax_utils_names_shardings_dtypes_and_keys() -> None:
    tree = {"attention": {"wq": jnp.ones((8, 4)), "norm": jnp.ones(4)}, "scale": jnp.ones(())}
    rules = [("attention/wq", PartitionSpec("fsdp", "mp")), (".*", PartitionSpec(None))]
    specs = jax_utils.match_partition_rules(rules, tree)
    assert specs["attention"]["wq"] == PartitionSpec("fsdp", "mp")
    assert specs["scale"] == PartitionSpec()
    with pytest.raises(ConfigError, match="no rule matches 'attention/norm'"):
        jax_utils.match_partition_rules(rules[:1], tree)
    mesh = jax_utils.get_jax_mesh("1,-1,1", ("dp", "fsdp", "mp"))
    assert mesh.shape["fsdp"] == jax.device_count()
    shard, gather = jax_utils.make_shard_and_gather_fns(specs, jnp.bfloat16, mesh=mesh)
    placed = jax_utils.tree_apply(shard, tree)
    assert placed["attention"]["wq"].dtype == jnp.bfloat16
    assert placed["attention"]["wq"].sharding.spec == PartitionSpec("fsdp", "mp")
    assert isinstance(jax_utils.tree_apply(gather, placed)["scale"], np.ndarray)
    mask = jax_utils.get_weight_decay_mask(["norm"])(tree)
    assert mask == {"attention": {"wq": True, "norm": False}, "scale": True}
    jax_utils.set_random_seed(3)
    first = jax_utils.next_rng()
    assert set(jax_utils.next_rng(("a", "b"))) == {"a", "b"} and len(jax_utils.next_rng(2)) == 2
    jax_utils.set_random_seed(3)
    assert (jax_utils.next_rng() == first).all()


def test_loss_and_accuracy_are_means_over_rows() -> None:
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.25, 0.75]], [[0.1, 0.9], [0.9, 0.1]]]))
    tokens, valid = jnp.array([[0, 1], [1, 1]]), jnp.array([[1, 1], [1, 0]])
    loss, accuracy = jax_utils.cross_entropy_loss_and_accuracy(logits, tokens, valid)
    expected = -((np.log(0.5) + np.log(0.75)) / 2 + np.log(0.9)) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(accuracy) == pytest.approx(1.0)
