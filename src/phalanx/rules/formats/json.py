"""A report as one JSON document; several reports as a list under `reports`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from phalanx.io.visible import visible_json
from phalanx.rules.formats.plain import report_dict
from phalanx.rules.judge import CheckReport


def render(reports: Sequence[CheckReport]) -> str:
    """The document, with a last line break."""
    documents = [report_dict(one) for one in reports]
    whole = documents[0] if len(documents) == 1 else {"reports": documents}
    return visible_json(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"
