"""Run the checks, and write the certificate as JSON and as a page."""

from __future__ import annotations

import hashlib
import html
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ed_data.errors import DataError
from ed_infra.errors import EasyDeLError

from ed_elarge.actions.provenance import versions
from ed_elarge.certify import (
    adapter_checks,
    gguf_checks,
    number_checks,
    settings_checks,
    template_checks,
    tensor_checks,
    token_checks,
)
from ed_elarge.certify.outcome import Failed, ModelCheck, NotApplicable, Outcome
from ed_elarge.certify.subject import CertifiedModel

MODEL_CHECKS: tuple[ModelCheck, ...] = (
    *template_checks.TEMPLATE_CHECKS,
    *token_checks.TOKEN_CHECKS,
    *tensor_checks.TENSOR_CHECKS,
    *settings_checks.SETTINGS_CHECKS,
    *adapter_checks.ADAPTER_CHECKS,
    *gguf_checks.GGUF_CHECKS,
    *number_checks.NUMBER_CHECKS,
)
JSON_NAME, PAGE_NAME = "certificate.json", "certificate.html"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
  color: #1c1e21; background: #fff; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd;
  vertical-align: top; overflow-wrap: anywhere; }
.failed { color: #b3261e; font-weight: 600; } .passed { color: #14713d; }
@media (prefers-color-scheme: dark) { body { color: #e4e6ea; background: #16181c; }
  td, th { border-color: #3a3d42; } .failed { color: #ff8a80; } .passed { color: #7bd8a0; } }
"""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        seconds: duration of the check.
    """

    name: str
    claim: str
    status: str
    evidence: str
    seconds: float


def findings(subject: CertifiedModel, *, with_model: bool = True) -> Iterator[Finding]:
    """Run the checks in order, and return each outcome.

    Args:
        with_model: also run the checks that compute with the model.
    """
    for check in MODEL_CHECKS:
        if not check.needs_model or with_model:
            began = time.monotonic()
            outcome = _outcome(check.run, subject)
            seconds = round(time.monotonic() - began, 3)
            yield Finding(check.name, check.claim, outcome.status, outcome.evidence, seconds)


def certificate(subject: CertifiedModel, all_findings: list[Finding]) -> dict[str, Any]:
    """Return the content of certificate.json."""
    counts = {
        status: sum(f.status == status for f in all_findings)
        for status in ("passed", "failed", "not applicable")
    }
    return {
        "directory": subject.directory.name,
        "files": {
            file.name: _digest(file)
            for file in sorted(subject.folder.iterdir())
            if file.suffix in (".json", ".jinja", ".safetensors", ".model", ".txt")
            and file.name != JSON_NAME
        },
        "versions": versions(),
        "summary": counts,
        "checks": [asdict(finding) for finding in all_findings],
    }


def _page(values: dict[str, Any]) -> str:
    """Return the certificate as an HTML page without external resources."""
    counts = values["summary"]
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = "\n".join(
        f"<tr><td class='{html.escape(check['status'])}'>{html.escape(check['status'])}</td>"
        f"<td>{html.escape(check['claim'])}</td><td>{html.escape(check['evidence'])}</td></tr>"
        for check in values["checks"]
    )
    title = f"Certificate of {html.escape(values['directory'])}"
    return (
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style>\n<h1>{title}</h1>\n<p>{said}</p>\n"
        f"<table><tr><th>result</th><th>claim</th><th>evidence</th></tr>\n{rows}\n</table></html>\n"
    )


def write_receipt(values: dict[str, Any], folder: Path) -> None:
    """Write certificate.json and certificate.html to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (folder / JSON_NAME).write_text(text, encoding="utf-8")
    (folder / PAGE_NAME).write_text(_page(values), encoding="utf-8")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _outcome(run: Callable[[CertifiedModel], Outcome], subject: CertifiedModel) -> Outcome:
    try:
        return run(subject)
    except NotApplicable as reason:
        return Outcome("not applicable", str(reason))
    except (Failed, EasyDeLError, DataError) as error:
        return Outcome("failed", str(error))
    except Exception as error:  # templates and tokenizers may raise any exception
        return Outcome("failed", f"the check ended with {type(error).__name__}: {error}"[:1000])
