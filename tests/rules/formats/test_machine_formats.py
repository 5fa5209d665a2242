"""JSON, GitHub commands, JUnit and HTML: every verdict, and hostile texts that stay texts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as Tree

from rules.toy import bad, made, mixed, rule

from phalanx.rules.formats import html, junit, machine
from phalanx.rules.formats.registry import FORMATS, render_reports
from phalanx.rules.formats.text import report_dict
from phalanx.rules.outcome import Impact


def test_json_has_every_field_of_every_finding() -> None:
    found = json.loads(render_reports("json", [mixed()], root="/", version=""))
    assert found["counts"] == {"pass": 2, "fail": 2, "unknown": 1, "waived": 1, "exempt": 1}
    assert (found["exit_code"], found["errors"], found["evidence"]) == (1, 1, "JP")
    first = found["findings"][0]
    assert first["edits"] == [{"key": "checkpoint.keep", "value": 3, "safe": True, "note": "enough"}]
    assert (first["rule"], first["verdict"], first["line"], first["value"]) == ("CKP901", "fail", 16, 7)
    assert first["fix"] == "checkpoint.keep = 3"
    assert {frozenset(one) for one in found["findings"]} == {frozenset(first)}


def test_json_of_several_targets_is_a_list() -> None:
    assert len(json.loads(render_reports("json", [mixed(), mixed()], root="/", version=""))["reports"]) == 2


def test_numbers_that_json_has_no_word_for_are_null() -> None:
    nan, inf = float("nan"), float("inf")
    report = made([rule(bad(value=nan, threshold=inf, impact=Impact(points=nan, usd=inf)))])
    found = report_dict(report)["findings"][0]
    assert (found["value"], found["threshold"], found["impact"]["points"], found["impact"]["usd"]) == (None,) * 4
    for name in FORMATS:
        assert render_reports(name, [report], root="/", version="1")


def test_github_commands_are_one_line_each_and_escaped() -> None:
    lines = machine.render_github([mixed()], root="/src").splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice", "::notice"]
    assert lines[0].startswith("::error file=job.toml,line=16,title=CKP901 toy-rule::7 toys lie about%0Atoys = 3 + 4")
    assert "50 %25 of [2J it" in lines[1]
    place = lines[1].split("::")[1]
    assert place == "warning file=runs/x y/events-00000.jsonl,line=7,title=CKP902 toy-rule"
    colons = made([rule(bad())])
    assert "file=a%3Ab%2Cc.toml" in machine.render_github([_elsewhere(colons, "a:b,c.toml")], root="/src")


def _elsewhere(report, file: str):
    from dataclasses import replace

    return replace(report, findings=tuple(replace(one, file=file) for one in report.findings))


def test_junit_counts_and_skips_what_is_unknown() -> None:
    suite = Tree.fromstring(junit.render_junit([mixed()]).encode()).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("7", "2", "2")
    cases = {(case.get("name") or "").split()[0]: case for case in suite}
    assert cases["FLT901"].find("skipped").get("message") == "unknown: nobody looked (look)"
    assert cases["CKP903"].find("skipped").get("message") == "waived: it is <my> birthday"
    assert cases["CKP901"].find("failure").get("type") == "error"
    assert "50 % of [2J it" in cases["CKP902"].find("failure").get("message")
    assert cases["FLT904"].find("failure") is None


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_html_is_one_closed_file_without_scripts() -> None:
    page = html.render_html([mixed()])
    seen = Tags()
    seen.feed(page)
    assert seen.open == []
    assert "script" not in seen.tags
    assert "&lt;b&gt;bold&lt;/b&gt; &quot;word&quot; &amp; 50 %" in page
    assert not re.search(r"https?://|url\(", page)
    assert "\x1b" not in page


def test_a_name_that_is_no_utf8_costs_no_report() -> None:
    report = _elsewhere(mixed(), "job-\udcff.toml")
    for name in FORMATS:
        assert b"job-" in render_reports(name, [report], root="/src", version="1").encode("utf-8"), name


def test_no_format_writes_controls() -> None:
    report = _elsewhere(made([rule(bad(what="a\x1b[2J\x9b1m\u202eb", value="v\x9b\u202e"))]), "c\x9b\u202e.toml")
    for name in FORMATS:
        text = render_reports(name, [report], root="/", version="1")
        assert text.replace("\n", "").isprintable(), name
    found = json.loads(render_reports("json", [report], root="/", version="1"))["findings"][0]
    assert (found["what"], found["file"]) == ("a\x1b[2J\x9b1m\u202eb", "c\x9b\u202e.toml")
