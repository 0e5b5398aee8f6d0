"""Lists in the pages about serving equal the tables of the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from ed_esurge.command import load
from ed_esurge.command.main import COMMANDS, main
from ed_esurge.config import ServerLimits
from ed_esurge.core.commands import Command
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.speech.library_files import AUDIO_FORMATS
from ed_infra.specs import QUANTIZATION_FORMATS

from tests.snippets.pages import blocks
from tools.workspace import ROOT

FOLDER = ROOT / "docs/serving"
PAGES = [*sorted(FOLDER.glob("*.md")), ROOT / "docs/serving.md", ROOT / "docs/tasks/serve.md"]
#: A page has one subject, so it is short.
MAX_WORDS = 1650
#: Bytes or seconds of a unit in the table of limits.
UNITS = {"MiB": 2**20, "GiB": 2**30, "s": 1, "h": 3600}


def read_row(page: Path, start: str) -> str:
    """Return the one row of a table whose first cell begins with a text."""
    (line,) = [x for x in page.read_text("utf-8").splitlines() if x.startswith(f"| {start}")]
    return line


def read_codes(text: str) -> list[str]:
    """Return the texts in code quotes."""
    return re.findall(r"`([^`]+)`", text)


def read_quantities(text: str) -> set[float]:
    """Return the numbers of a text in bytes, seconds or items: `8 MiB`, `50,000`."""
    return {
        float(number.replace(",", "")) * UNITS.get(unit, 1)
        for number, unit in re.findall(r"\b(\d[\d,]*\d|\d)(?: (MiB|GiB|s|h)\b)?", text)
    }


def test_tools_page_names_every_format() -> None:
    page = FOLDER / "tools.md"
    _, *tools = read_codes(read_row(page, "`tool_parser_name`"))
    _, *reasoning = read_codes(read_row(page, "`reasoning_parser`"))
    assert tools == list(TOOL_FORMATS)
    assert reasoning == list(REASONING_FORMATS)


def test_start_page_names_every_format_of_weights_and_caches() -> None:
    _, _, values, _ = read_row(FOLDER / "start.md", "`--quantization`").split("|", 3)
    named = read_codes(values.partition("is an alias")[0])
    assert {*named} == {*QUANTIZATION_FORMATS, "none", "bitsandbytes"}
    _, _, values, _ = read_row(FOLDER / "start.md", "`--kv-cache-dtype`").split("|", 3)
    assert {*read_codes(values.partition(";")[0])} == {"auto", *load._CACHE_DTYPES}


def test_security_page_states_access_and_limits_of_the_code() -> None:
    page = FOLDER / "security.md"
    for access, start in {"open": "`/`", "admin": "`/v1/load_lora_adapter`"}.items():
        paths = read_codes(read_row(page, start).split("|")[1])
        assert {*paths} == {one.path for one in list_endpoints() if one.access == access}
    text = page.read_text("utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| `max_") or "_timeout`" in row]
    rows.append(read_row(page, "`batch_concurrency`"))
    limits = {name: row for row in rows for name in read_codes(row.split("|")[1])}
    defaults = ServerLimits()
    assert limits.keys() == ServerLimits.model_fields.keys()
    for name, row in limits.items():
        value = getattr(defaults, name)
        assert value is None or value in read_quantities(row.split("|")[2]), (name, value)


def test_engine_page_names_every_command() -> None:
    *named, _ = read_codes(read_row(FOLDER / "engine.md", "commands:"))
    assert {*named} == {command.__name__ for command in get_args(Command)}


def test_media_page_names_every_format_of_recordings() -> None:
    text = (FOLDER / "media.md").read_text("utf-8").upper()
    assert not [
        name for name in AUDIO_FORMATS if not re.search(rf"\b{name.removesuffix('EX')}\b", text)
    ]


def test_flags_of_the_serving_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main([command, "--help"]) for command in COMMANDS] == [0] * len(COMMANDS)
    rows = re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, flags=re.M)
    flags = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", " ".join(rows).replace(",", " ")))
    for page in PAGES:
        commands = [b.body.replace("\\\n", "") for b in blocks(page) if b.language == "bash"]
        lines = [row for body in commands for row in body.splitlines() if row.startswith("esurge ")]
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.M | re.DOTALL)
        for text in (*read_codes(prose), *lines):
            named = set(re.findall(r"(?<!\S)(--?[a-z][\w-]*)", text))
            if not text.startswith(("elarge", "uv ", "curl", "python", "pip")):
                assert named <= flags | {"-d"}, (page.name, named - flags)


def test_a_serving_page_has_at_most_1650_words() -> None:
    sizes = {page.name: len(page.read_text("utf-8").split()) for page in FOLDER.glob("*.md")}
    assert len(sizes) == 8
    assert not {name: size for name, size in sizes.items() if size > MAX_WORDS}
