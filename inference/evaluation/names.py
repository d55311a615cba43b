"""How reports show a drafter: in tables, pictures, answer files and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOSSY = "LOSSY"


def shown_name(row: Mapping[str, Any]) -> str:
    """A row's drafter with its kind where the name does not hold it, and LOSSY where its answers are not the target's.

    `medusa (ctc)` for a CTC head under that name, `ctc_raw` for one whose name holds the kind, `ctc (LOSSY)` under
    typical acceptance.
    """
    name, kind = row["drafter"], row.get("kind") or ""
    notes = [] if all(part in name for part in kind.split("+")) else [kind]
    notes += [LOSSY] if row.get("lossy") else []
    return f"{name} ({', '.join(notes)})" if notes else str(name)


def shown_names(results: list[dict[str, Any]]) -> dict[str, str]:
    """Drafter → its `shown_name`, of a report's rows."""
    return {row["drafter"]: shown_name(row) for row in results}
