"""A plan as one HTML file without external resources: a bar of the memory, tables, meshes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from ed_elarge.plan.devices import GIB
from ed_elarge.plan.report import CLOSE_TEXT, COMPILER_TITLES, change_text

_COLORS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
    "#5b7f2b",
    "#b5487a",
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
  color: #1c1e21; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem;
  text-align: left; border-bottom: 1px solid #ddd; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.verdict { font-weight: 600; } .no { color: #b3261e; } .yes { color: #14713d; }
svg { width: 100%; height: auto; } .key { display: inline-block; width: .8em; height: .8em;
  margin-right: .5em; }
@media (prefers-color-scheme: dark) { body { color: #e4e6ea; background: #16181c; }
  td, th { border-color: #3a3d42; } .no { color: #ff8a80; } .yes { color: #7bd8a0; } }
"""


def render_page(values: Mapping[str, Any]) -> str:
    """Return the page of a plan from its JSON values."""
    hardware, model = values["hardware"], values["model"]
    title = f"{model['model_type']} on {hardware['count']} x {hardware['device']}"
    body = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{model['parameters']:,} parameters; {hardware['usable_bytes'] / GIB:.1f} GiB "
        f"usable on each device. Source of the device's figures: {_text(hardware['source'])}.</p>",
    ]
    for name in ("training", "serving"):
        if name in values:
            body += _part(name, values[name])
    if "compiled" in values:
        body += _render_compiled(values["compiled"])
    body += _meshes(values["meshes"])
    return (
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{_text(title)}</title><style>{_STYLE}</style>\n" + "\n".join(body) + "\n</html>\n"
    )


def _part(name: str, part: Mapping[str, Any]) -> Iterable[str]:
    memory, time = part["memory"], part["time"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in part["mesh"].items() if size > 1)
    yield f"<h2>Memory of {name} on each device ({_text(mesh or 'one device')})</h2>"
    yield _bar(memory)
    free, fits = abs(memory["free"]) / GIB, memory["fits"]
    words = f"fits, {free:.2f} GiB free" if fits else f"does not fit, {free:.2f} GiB missing"
    yield f"<p class='verdict {'yes' if fits else 'no'}'>{words}</p>"
    if part.get("close"):
        yield f"<p>{CLOSE_TEXT[0].upper()}{CLOSE_TEXT[1:]}.</p>"
    rows = [
        (f"<span class='key' style='background:{color}'></span>{_text(key)}", _gib(size))
        for (key, size), color in zip(memory["parts"].items(), _COLORS, strict=False)
    ]
    yield _table(("part", "GiB"), [*rows, ("total", _gib(memory["total"]))])
    if part.get("changes"):
        yield "<h2>Changes that save memory</h2><ul>"
        yield from (f"<li>{_text(change_text(change))}</li>" for change in part["changes"])
        yield "</ul>"
    yield "<h2>Roofline of a step</h2><p>Lower bounds, not measured on this hardware. The slowest "
    yield "part determines the step.</p>"
    rows = [(_text(key), f"{value * 1e3:,.2f}") for key, value in time["seconds"].items()]
    yield _table(("part or mesh axis", "ms"), rows)
    traffic_rows = [(_text(key), _gib(size)) for key, size in time["collective_bytes"].items()]
    if traffic_rows:
        yield _table(("mesh axis", "GiB that a device sends"), traffic_rows)
    yield f"<p>At most {time['tokens_per_second']:,.0f} tokens/s, MFU {time['mfu']:.1%}.</p>"


def _bar(memory: Mapping[str, Any]) -> str:
    """Return the parts as a horizontal bar with a line at the limit."""
    width, bar_bytes = 1000.0, max(memory["total"], memory["limit"])
    x, drawn = 0.0, []
    for (name, size), color in zip(memory["parts"].items(), _COLORS, strict=False):
        part = width * size / bar_bytes
        label = f"{name}: {size / GIB:.2f} GiB"
        drawn.append(
            f"<rect x='{x:.2f}' y='8' width='{part:.2f}' height='44' fill='{color}'>"
            f"<title>{_text(label)}</title></rect>"
        )
        x += part
    limit = width * memory["limit"] / bar_bytes
    drawn.append(
        f"<line x1='{limit:.2f}' x2='{limit:.2f}' y1='0' y2='60' stroke='currentColor' "
        "stroke-width='3' stroke-dasharray='6 4'/>"
    )
    label = f"{memory['total'] / GIB:.2f} of {memory['limit'] / GIB:.2f} GiB"
    return (
        f"<svg viewBox='-2 0 1004 62' role='img' aria-label='{_text(label)}'>"
        + "".join(drawn)
        + "</svg>"
    )


def _meshes(meshes: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    yield "<h2>Meshes by predicted time</h2>"
    rows = [
        (
            _text(one["axes"]),
            _gib(one["total"]),
            f"{one['tokens_per_second']:,.0f}",
            _text(one["why_not"] or "best"),
        )
        for one in meshes
    ]
    yield _table(("mesh", "GiB", "tokens/s", "result"), rows)


def _render_compiled(compiled: Mapping[str, Any]) -> Iterable[str]:
    yield f"<h2>Compiled for {_text(compiled['device'])}</h2>"
    yield f"<p>Compiler: {_text(COMPILER_TITLES[compiled['backend']])}</p>"
    rows = [
        (_text(r["name"]), _gib(r["predicted"]), _gib(r["compiled"]), f"{r['error']:+.1%}")
        for r in compiled["rows"]
    ]
    if rows:
        yield _table(("buffers of the train step", "GiB predicted", "GiB compiled", "error"), rows)
    for step in compiled.get("steps", ()):
        yield f"<h3>{_text(step['name'])}: {step['seconds'] * 1e3:,.3f} ms</h3>"
        operations = [
            (
                *(_text(row["operation"]), f"{row['launches']:,.0f}", _gib(row["bytes"])),
                *(f"{row['flops'] / 1e12:.3f}", f"{row['seconds'] * 1e3:,.3f}"),
            )
            for row in step["operations"]
        ]
        yield _table(("operation", "launches", "GiB", "TFLOP", "ms at least"), operations)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; cells after the first that begin with a digit or a sign align right."""

    def cell(tag: str, value: str) -> str:
        number = value[:1].isdigit() or value[:1] in "+-"
        return f"<{tag}{' class=n' if number else ''}>{value}</{tag}>"

    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(cell("td", c) for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _gib(size: float) -> str:
    return f"{size / GIB:.3f}"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
