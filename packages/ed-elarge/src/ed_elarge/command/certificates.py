"""The command `certify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from ed_esurge.command.program import Result, show_result


def certify(
    directory: Annotated[
        Path, typer.Argument(help="A model directory, or the output folder of a run.")
    ],
    against: Annotated[
        Path | None,
        typer.Option(help="The model before training, or the model in full precision."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the certificate; default: DIRECTORY.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only check files and tokens, without the model.")
    ] = False,
) -> Result:
    """Check that a model is the model that was trained, and write a certificate.

    certificate.json and certificate.html contain each check with its evidence. The exit code is 1
    if a check failed.
    """
    from ed_models.checkpoints.model_card import add_section

    from ed_elarge.certify.receipt import (
        JSON_NAME,
        PAGE_NAME,
        certificate,
        findings,
        write_receipt,
    )
    from ed_elarge.certify.subject import CertifiedModel

    subject, all_findings = CertifiedModel(directory, against), []
    for finding in findings(subject, with_model=not quick):
        show_result(f"{finding.status:<15} {finding.claim}")
        if finding.status == "failed":
            show_result(f"{'':<15} {finding.evidence}")
        all_findings.append(finding)
    values, folder = certificate(subject, all_findings), output or directory
    write_receipt(values, folder)
    counts = [f"- {count} {status}" for status, count in values["summary"].items()]
    add_section(subject.folder, "Certificate", [*counts, f"- Checks: `{JSON_NAME}`"])
    show_result(", ".join(f"{count} {status}" for status, count in values["summary"].items()))
    show_result(str(folder / PAGE_NAME))
    return Result(values, int(values["summary"]["failed"] > 0))
