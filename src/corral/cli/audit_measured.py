"""`corral audit AUDIT`: what was measured already, in a folder."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from corral.cli.audit_result import Audited


def measured_audit(folder: Path, arguments: argparse.Namespace) -> Audited:
    """An audit in a folder, with what shows it."""
    from corral.audit.folder import read_audit
    from corral.audit.summary import summarise, table_columns
    from corral.audit.tally import Tally
    from corral.audit.tokens import audit_tokens
    from corral.cli.audit_view import show
    from corral.report.audit.page import write_audit_page

    info, table = read_audit(folder)
    summary = summarise(table, info["rules"])

    def numbers() -> dict[str, Any]:
        tally = Tally(info["rules"]["kl_bound"], info["rules"]["tv_bound"])
        tally.add(audit_tokens(table_columns(table)))
        tally.sequences = summary.sequences
        verdicts = {name: _plain_row(row) for name, row in summary.verdicts.items()}
        return {
            **tally.summary().as_dict(),
            "verdicts": verdicts,
            "what": info.get("what"),
            "rules": info["rules"],
            "updates_made": info["updates_made"],
            "one_update_per_batch": info.get("one_update_per_batch"),
        }

    return Audited(
        page=folder / "audit.html",
        write_page=lambda page, live: write_audit_page(info, table, summary, page, live),
        numbers=numbers,
        show=lambda last: show(summary, info, last, quiet=arguments.quiet),
        clipping=summary.verdicts["clipped"]["kl"],
        newest=f"update {table['update'][-1].as_py():,}",
    )


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose values may be dataclasses, for JSON."""
    return {key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value for key, value in row.items()}
