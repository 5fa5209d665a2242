"""The output formats by name; each module is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import PhalanxError
from phalanx.rules.run_rules import CheckReport

FORMATS = ("text", "json", "sarif", "github", "junit", "html")


def render_reports(
    name: str,
    reports: Sequence[CheckReport],
    *,
    root: str,
    version: str,
    verbose: bool = False,
    failures: Sequence[PhalanxError] = (),
) -> str:
    """Render reports in a format; file names are relative to the folder `root`, `version` is that of Phalanx.

    `failures` are targets that could not be read; formats for programs include them too.
    """
    if name == "html":
        from phalanx.rules.formats.html import render_html

        text = render_html(reports)
    elif name == "text":
        from phalanx.rules.formats.text import render_text

        text = render_text(reports, verbose=verbose)
    elif name == "junit":
        from phalanx.rules.formats.junit import render_junit

        text = render_junit(reports, failures)
    else:
        from phalanx.rules.formats import machine

        if name == "sarif":
            text = machine.render_sarif(reports, root=root, version=version, failures=failures)
        elif name == "github":
            text = machine.render_github(reports, root=root, failures=failures)
        else:
            text = machine.render_json(reports, failures)
    # A file name that is not valid UTF-8 must not cost the whole report.
    return text.encode("utf-8", "replace").decode("utf-8")
