"""Released coding agents complete a tool loop against the server: read, edit, run, see an image.

The released programs are installed with npm into `.cache/agents`, or EASYDEL_AGENTS names a folder
with `node_modules`. Each has a HOME of its own and a dummy key, and reaches only this server. The
model is scripted: each reply calls the next tool of the loop.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from PIL import Image

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "@anthropic-ai/claude-code@2",
    "@openai/codex@0",
    "opencode-ai@1",
    "@qwen-code/qwen-code@0",
    "@mariozechner/pi-coding-agent@0",
)
TEMPLATE = (
    "{% for t in tools or [] %}[tool {{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}<|assistant|>"
)
Calls = list[tuple[str, dict[str, object]]]
TASK = "Change the sum to 2 + 2, run it, and look at the picture."


class Processor:
    """One feature for each image."""

    image_token = "<image>"

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def _merge_kwargs(self, **options):
        return {"images_kwargs": options}

    def _process_images(self, images, *, return_tensors):
        pixels = [np.asarray(image, np.float32).mean((0, 1))[:, None, None] for image in images]
        return {"pixel_values": np.array(pixels)}, [self.image_token] * len(images)


class Agent(ScriptedEngine):
    """Calls one tool after the other, and answers at the end.

    Args:
        calls: names and arguments of the tools.
        vision: whether the model reads images.
    """

    def __init__(self, calls: Calls, vision: bool) -> None:
        self.calls, self.prompts, self.images = calls, [], 0
        tokenizer = byte_tokenizer(TEMPLATE)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        super().__init__(self.reply, tokenizer=tokenizer, max_model_len=2**20)
        if vision:
            self.input_names = ("input_ids", "pixel_values")
            self.processor = Processor(tokenizer)

    def reply(self, ids: list[int], choice: int) -> str:
        prompt = self.tokenizer.decode(ids)
        if f"[tool {self.calls[0][0]}]" not in prompt:  # a title of the session
            return "A sum"
        self.prompts.append(prompt)
        done = prompt.count("<|tool|>")
        if done == len(self.calls):
            return "The total is 4."
        name, arguments = self.calls[done]
        call = json.dumps({"name": name, "arguments": arguments})
        return f"Next.\n<tool_call>\n{call}\n</tool_call>"

    def generate(self, prompt, params, request_id, **options):
        self.images = max(self.images, len(options.get("encoder_inputs", ())))
        return super().generate(prompt, params, request_id, **options)


@pytest.fixture(scope="session")
def programs() -> Path:
    """Return the folder of the installed programs."""
    chosen = os.environ.get("EASYDEL_AGENTS")
    folder = Path(chosen) if chosen else ROOT / ".cache" / "agents"
    binaries = folder / "node_modules" / ".bin"
    if not (binaries / "claude").exists() or not (binaries / "codex").exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if installed.returncode:
            pytest.skip("npm cannot install the coding agents")
    return binaries


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Return a folder with a program and a picture."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sum.py").write_text("total = 1 + 1\nprint('total', total)\n")
    Image.new("RGB", (16, 16), "red").save(folder / "picture.png")
    return folder


def execute(command: list[str], folder: Path, home: Path, **environment: str) -> str:
    """Run a program with a HOME of its own, and return its output."""
    home.mkdir(exist_ok=True)
    variables = {"HOME": str(home), "PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def check_loop(agent: Agent, folder: Path, vision: bool) -> None:
    """Check that every tool ran, and that the model received its result."""
    assert (folder / "sum.py").read_text().startswith("total = 2 + 2")
    last = agent.prompts[-1]
    assert last.count("<|tool|>") == len(agent.calls)
    assert "total = 1 + 1" in last and "total 4" in last
    assert agent.images == (1 if vision else 0)
    assert ("reads only text" in last) == (not vision)


OPTIONS = ("--output-format", "json", "--allowedTools", "Read Edit Bash")


@pytest.mark.parametrize("vision", [True, False])
def test_claude_code_completes_a_tool_loop(programs, workspace, tmp_path, vision):
    program, picture = workspace / "sum.py", workspace / "picture.png"
    edit = {"file_path": str(program), "old_string": "1 + 1", "new_string": "2 + 2"}
    calls: Calls = [
        ("Read", {"file_path": str(program)}),
        ("Edit", edit),
        ("Bash", {"command": f"python3 {program}", "description": "run"}),
        ("Read", {"file_path": str(picture)}),
    ]
    agent = Agent(calls, vision)
    with background(agent, api_key="dummy", batch_directory=tmp_path / "batches") as url:
        output = execute(
            [str(programs / "claude"), "-p", TASK, "--model", "scripted", *OPTIONS],
            workspace,
            tmp_path / "home",
            ANTHROPIC_BASE_URL=url.removesuffix("/v1"),
            ANTHROPIC_API_KEY="dummy",
            ANTHROPIC_SMALL_FAST_MODEL="scripted",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            IS_SANDBOX="1",
        )
    result = json.loads(output)
    assert (result["is_error"], result["result"]) == (False, "The total is 4.")
    check_loop(agent, workspace, vision)
    assert "billing-header" not in agent.prompts[-1]


def read_settings(program: str, url: str) -> str:
    """Return the settings of the page for a program and a server."""
    page = (ROOT / "docs/tasks/coding_agents.md").read_text("utf-8")
    section = re.split(rf"^## {program}$", page, flags=re.MULTILINE)[1].split("\n## ")[0]
    (settings,) = re.findall(r"```(?:toml|json)\n(.*?)```", section, re.DOTALL)
    settings = settings.replace('"coder"', '"scripted"').replace("/coder", "/scripted")
    return settings.replace("http://127.0.0.1:11556/v1", url)


@pytest.mark.parametrize("vision", [True, False])
def test_codex_completes_a_tool_loop(programs, workspace, tmp_path, vision):
    program, picture = workspace / "sum.py", workspace / "picture.png"
    calls: Calls = [
        ("exec_command", {"cmd": f"cat {program}"}),
        ("exec_command", {"cmd": f"sed -i 's/1 + 1/2 + 2/' {program}"}),
        ("exec_command", {"cmd": f"python3 {program}"}),
        ("view_image", {"path": str(picture)}),
    ]
    agent = Agent(calls, vision)
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    with background(agent, api_key="dummy", batch_directory=tmp_path / "batches") as url:
        settings = 'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        settings += read_settings("Codex", url)
        (home / ".codex" / "config.toml").write_text(settings)
        output = execute(
            [str(programs / "codex"), "exec", "--skip-git-repo-check", "--json", TASK],
            workspace,
            home,
            ESURGE_API_KEY="dummy",
        )
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "turn.completed"
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("text")]
    assert said[-1] == "The total is 4."
    check_loop(agent, workspace, vision)


#: Program, place of its settings below the home, its command, and its calls; `FILE` and `PICTURE`
#: stand for paths.
CHAT_PROGRAMS = {
    "OpenCode": (
        ".config/opencode/opencode.json",
        ["opencode", "run", TASK],
        [
            ("read", {"filePath": "FILE"}),
            ("edit", {"filePath": "FILE", "oldString": "1 + 1", "newString": "2 + 2"}),
            ("bash", {"command": "python3 FILE", "description": "run"}),
            ("read", {"filePath": "PICTURE"}),
        ],
    ),
    "Qwen Code": (
        ".qwen/settings.json",
        ["qwen", "-p", TASK, "--yolo"],
        [
            ("read_file", {"file_path": "FILE"}),
            ("edit", {"file_path": "FILE", "old_string": "1 + 1", "new_string": "2 + 2"}),
            (
                "run_shell_command",
                {"command": "python3 FILE", "is_background": False, "description": "run"},
            ),
            ("read_file", {"file_path": "PICTURE"}),
        ],
    ),
    "Pi": (
        ".pi/agent/models.json",
        ["pi", "-p", TASK, "--provider", "local", "--model", "scripted"],
        [
            ("read", {"path": "FILE"}),
            ("edit", {"path": "FILE", "edits": [{"oldText": "1 + 1", "newText": "2 + 2"}]}),
            ("bash", {"command": "python3 FILE"}),
            ("read", {"path": "PICTURE"}),
        ],
    ),
}


@pytest.mark.parametrize("name", CHAT_PROGRAMS)
def test_agents_with_chat_completions_complete_a_tool_loop(programs, workspace, tmp_path, name):
    settings_path, command, calls = CHAT_PROGRAMS[name]
    binary = programs / command[0]
    if not binary.exists():
        pytest.skip(f"{name} is not installed")
    text = json.dumps(calls).replace("FILE", str(workspace / "sum.py"))
    text = text.replace("PICTURE", str(workspace / "picture.png"))
    agent = Agent([(tool, arguments) for tool, arguments in json.loads(text)], vision=True)
    home = tmp_path / "home"
    settings = home / settings_path
    settings.parent.mkdir(parents=True)
    with background(agent, api_key="dummy", batch_directory=tmp_path / "batches") as url:
        settings.write_text(read_settings(name, url))
        output = execute(
            [str(binary), *command[1:]],
            workspace,
            home,
            OPENAI_BASE_URL=url,
            OPENAI_API_KEY="dummy",
            ESURGE_API_KEY="dummy",
        )
    assert "The total is 4." in output
    check_loop(agent, workspace, vision=True)
