"""`trainer.tools`: functions as JSON schemas in the prompts, checked before the run."""

from __future__ import annotations

import json
import sys

import pytest
from ed_data import train_bpe
from ed_elarge.building.tools import build_tool_set, describe_function
from ed_elarge.config.checks import machine
from ed_elarge.model import eLargeModel
from ed_infra.errors import ConfigError
from ed_trainers import trainer_class
from ed_trainers.arguments import arguments_class

TOOL = '''
def look(place: str) -> str:
    """
    Look at a place.

    Args:
        place: The place.
    """
    return place
'''


METHOD = '''
def visit(self, place: str) -> str:
    """
    Visit a place.

    Args:
        place: The place.
    """
    return place

def reset(self, messages, row):
    pass

def step(self, messages):
    pass
'''


def look(place: str) -> str:
    """
    Look at a place.

    Args:
        place: The place.
    """
    return place


def write_run(folder, **trainer):
    (folder / "tools.py").write_text(TOOL)
    rows = [{"prompt": [{"role": "user", "content": f"Question {i}"}]} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = train_bpe(["look at a place"], 300, special_tokens=["<|im_end|>"])
    tokenizer.save_pretrained(folder / "tokenizer")
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    return eLargeModel(
        {
            "model": {"config": config, "tokenizer": {"name_or_path": str(folder / "tokenizer")}},
            "mixture": {
                "informs": [{"data_files": str(folder / "rows.jsonl"), "content_field": "prompt"}]
            },
            "trainer": {
                "trainer_type": "grpo",
                "reward_functions": [{"regex": {"pattern": "a"}}],
                "save_directory": str(folder / "run"),
                **trainer,
            },
        }
    )


def test_prompts_contain_the_schemas_of_the_functions(tmp_path):
    elm = write_run(tmp_path, tools=f"{tmp_path / 'tools.py'}:look")
    tools = elm.part("tools")
    assert list(tools.functions) == ["look"] and tools.seconds == 30
    assert tools.schemas == [describe_function(look)]
    loader = elm.build_dataset()
    text = elm.build_tokenizer().decode(loader.batch_at(0).input_ids[0])
    assert json.dumps(tools.schemas[0]) in text and "Look at a place." in text
    other = write_run(tmp_path)
    assert other.part("tools") is None
    assert other.build_dataset().fingerprint != loader.fingerprint
    other.tools = (look,)
    other.clear_cache()
    assert other.part("tools").functions == {"look": look}


def test_functions_that_do_not_exist_are_found_before_the_run(tmp_path):
    elm = write_run(tmp_path, tools=[f"{tmp_path / 'tools.py'}:lok", "nowhere.py:look"])
    first, second = machine.tools(elm.config)
    assert first.path == ("trainer", "tools", 0) and "has no 'lok'" in first.message
    assert second.path == ("trainer", "tools", 1) and "no file 'nowhere.py'" in second.message


def test_functions_that_cannot_be_described_are_errors(tmp_path):
    options = arguments_class("grpo")(reward_functions="m:f", tools="m:f")
    tokenizer = write_run(tmp_path).build_tokenizer()

    def undescribed(place: str) -> str:
        return place

    def unannotated(place):
        """
        Look.

        Args:
            place: The place.
        """

    for function in (undescribed, unannotated):
        with pytest.raises(ConfigError, match="cannot be described to the model"):
            build_tool_set([function], tokenizer, options)
    with pytest.raises(ConfigError, match="two tools have the name 'look'"):
        build_tool_set([look, look], tokenizer, options)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the tokenizer has none"):
        build_tool_set([look], tokenizer, options)


def test_methods_of_an_environment_are_described_without_self(tmp_path):
    body = "".join(f"    {line}\n" if line else "\n" for line in METHOD.splitlines())
    (tmp_path / "places.py").write_text(f"class Places:\n    tools = ('visit',)\n{body}")
    address = f"{tmp_path / 'places.py'}:Places"
    elm = write_run(tmp_path, environment=address, tools=f"{tmp_path / 'tools.py'}:look")
    tools = elm.part("tools")
    assert [one["function"]["name"] for one in tools.schemas] == ["look", "visit"]
    assert tools.schemas[1]["function"]["parameters"]["required"] == ["place"]
    assert list(tools.functions) == ["look"]
    assert list(write_run(tmp_path, environment=address).part("tools").schemas) == tools.schemas[1:]
    (tmp_path / "other.py").write_text(f"class Other:\n    tools = ('fly',)\n{body}")
    elm = write_run(tmp_path, environment=f"{tmp_path / 'other.py'}:Other")
    with pytest.raises(ConfigError, match=r"Other\.tools has 'fly', and the class has no such"):
        elm.part("tools")


@pytest.mark.nightly
def test_trainer_of_python_accepts_functions(tmp_path):
    elm = write_run(tmp_path)
    arguments = arguments_class("grpo")(
        total_batch_size=2,
        num_return_sequences=2,
        max_turns=2,
        max_prompt_length=200,
        max_completion_length=8,
        max_training_steps=1,
        save_directory=str(tmp_path / "run"),
        use_tensorboard=False,
    )
    messages = []

    def count(completions, **fields):
        messages.extend(completions)
        return [float(len(one)) for one in completions]

    options = {"processing_class": elm.build_tokenizer(), "reward_functions": count}
    rows = [{"prompt": [{"role": "user", "content": "Look."}]}] * 2
    model = elm.part("model")
    trainer = trainer_class("grpo")(arguments, model, rows, tools=[look], **options)
    assert trainer.method.tools.functions == {"look": look}
    trainer.train()
    assert messages[0][0]["role"] == "assistant"
    with pytest.raises(ConfigError, match="pass rows as train_dataset"):
        trainer_class("grpo")(arguments, model, None, tools=[look], **options)
    with pytest.raises(ConfigError, match="does not sample completions: omit tools"):
        trainer_class("sft")(arguments_class("sft")(), model, None, tools=[look])


def test_other_processes_need_names_of_functions(tmp_path):
    elm = write_run(tmp_path)
    elm.update_config({"asynchronous": {"max_staleness": 0}})
    elm.tools = (look,)
    with pytest.raises(ConfigError, match="write their names as"):
        elm.part("tools")


MCP_SERVER = '''
from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"{city}: {days} sunny days"


@server.tool()
def broken() -> str:
    """Fail."""
    raise ValueError("no weather")


@server.tool()
def secret() -> str:
    """Return a secret."""
    return "secret"


server.run("stdio")
'''


def test_tools_of_an_mcp_server_are_described_and_called(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(MCP_SERVER)
    server = {"command": sys.executable, "args": [str(tmp_path / "server.py")]}
    server["allowed_tools"] = ["weather", "broken"]
    elm = write_run(tmp_path, tools=[f"{tmp_path / 'tools.py'}:look", {"mcp": server}])
    assert not list(machine.tools(elm.config))
    tools = elm.part("tools")
    assert [one["function"]["name"] for one in tools.schemas] == ["look", "weather", "broken"]
    assert tools.schemas[1]["function"] == {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
        },
    }
    calls = [
        {"function": {"name": name, "arguments": arguments}}
        for name, arguments in (
            ("weather", {"city": "Oslo", "days": 3}),
            ("look", {"place": "here"}),
            ("broken", {}),
            ("weather", {}),
            ("secret", {}),
        )
    ]
    answers = [one["content"] for one in tools.answer({"tool_calls": calls})]
    assert answers[:2] == ["Oslo: 3 sunny days", "here"]
    assert all(answer.startswith("{'error': ") for answer in answers[2:])
    assert "Error executing tool broken" in answers[2] and "city" in answers[3]
    assert "Tool secret not found" in answers[4]


def test_wrong_options_of_an_mcp_server_are_errors(tmp_path):
    servers = [
        {"command": "a", "url": "http://127.0.0.1/mcp"},
        {"comand": "a"},
        {"command": "a", "require_approval": "never"},
        {"command": "a", "timeout": 0},
    ]
    elm = write_run(tmp_path, tools=[{"mcp": server} for server in servers])
    found = [(problem.path[2:], problem.message) for problem in machine.tools(elm.config)]
    assert found[0] == ((0, "mcp"), "an MCP server has either a command (stdio) or a url (HTTP)")
    assert found[1][0] == (1, "mcp", "comand") and "did you mean 'command'" in found[1][1]
    assert found[2][0] == (2, "mcp", "require_approval")
    assert found[3][0] == (3, "mcp", "timeout") and "greater than 0" in found[3][1]
    pytest.importorskip("mcp")
    for server, message in (
        ({"command": sys.executable, "args": ["-c", "0"], "timeout": 20}, "cannot be reached"),
        ({"comand": "a"}, "mcp.comand: unknown option"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_run(tmp_path, tools=[{"mcp": server}]).part("tools")


def test_environments_are_checked_before_the_run(tmp_path):
    for environment, path, message in (
        ("gymnasum", (), "did you mean 'gymnasium'"),
        ({"gymnasium": {"idd": "a"}}, ("gymnasium", "idd"), "did you mean 'id'"),
        ({"openenv": {}}, ("openenv",), "needs url"),
        ({"openenv": {"url": 1}}, ("openenv", "url"), "valid string"),
        ("nowhere.py:Places", (), "no file 'nowhere.py'"),
    ):
        elm = write_run(tmp_path, environment=environment)
        (problem,) = machine.environment(elm.config)
        assert problem.path == ("trainer", "environment", *path)
        assert message in problem.message
