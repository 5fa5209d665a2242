"""The formats by name; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.rules.judge import CheckReport

FORMATS = ("text", "json", "sarif", "github", "junit", "html")


def render(name: str, reports: Sequence[CheckReport], *, root: str, version: str, verbose: bool = False) -> str:
    """Reports in a format; `root` is the folder that file names are told from, `version` that of Phalanx."""
    if name == "json":
        from phalanx.rules.formats import json

        text = json.render(reports)
    elif name == "sarif":
        from phalanx.rules.formats import sarif

        text = sarif.render(reports, root=root, version=version)
    elif name == "github":
        from phalanx.rules.formats import github

        text = github.render(reports, root=root)
    elif name == "junit":
        from phalanx.rules.formats import junit

        text = junit.render(reports)
    elif name == "html":
        from phalanx.rules.formats import html

        text = html.render(reports)
    else:
        from phalanx.rules.formats import text as plain_text

        text = plain_text.render(reports, verbose=verbose)
    # a file name that is no UTF-8 must not cost the whole report
    return text.encode("utf-8", "replace").decode("utf-8")
