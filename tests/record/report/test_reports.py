"""The report as HTML and Markdown: complete, self-contained, and safe whatever the run folder holds."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_run

from phalanx.cli.watch_screen import frame
from phalanx.io.svg import PlotLine, PlotMark, axis_format, line_plot, stacked_bar
from phalanx.record.report import html, render
from phalanx.record.report.live import Watcher
from phalanx.record.report.render import render_text
from phalanx.record.report.run_report import RunReport, read_run_report
from phalanx.record.run import Run
from phalanx.units import format_seconds

EVIL = '<script>alert(1)</script>"\x1b[2J|`*'
HEADINGS = (
    "Prediction and measurement", "Learning", "Over the run", "Where the time went", "Ranks", "Incidents",
    "Checkpoints", "Cost, energy and carbon", "Samples",
)  # fmt: skip
PLOTS = (
    "Loss", "Tokens per second", "MFU", "Effective training time", "Gradient noise scale, samples", "Gradient norm",
    "Memory of rank 0", "A step of rank 0", "Utilization of rank 0",
)  # fmt: skip


class Seen(HTMLParser):
    """What a browser would make of a page: tags, attributes, text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return read_run_report(write_run(tmp_path_factory.mktemp("story"), steps=120, straggler=2))


def test_the_page_tells_everything(story: RunReport) -> None:
    page = html.render_html(story, made="by a test")
    assert tuple(re.findall("<h2>(.*?)</h2>", page)) == HEADINGS
    assert tuple(re.findall("<figcaption><b>(.*?)</b>", page)) == PLOTS
    for text in ("rank 2 (data 1, tensor 0, on host-1) is at work", "killed by signal 9", "4 ranks"):
        assert text in page
    assert "The parts add up to the wall clock." in page
    assert "The ranks move in lockstep." in page
    assert "nvml, summed over ranks and restarts" in page
    assert page.count('class="mark incident"') == len(PLOTS) - 1  # not on the axis of time


def test_the_page_needs_nothing_and_runs_nothing(story: RunReport) -> None:
    page = html.render_html(story, made="by a test")
    seen = Seen(page)
    assert seen.open == []
    assert not {"script", "link", "img", "iframe", "object", "a", "form"}.intersection(seen.tags)
    names = {name for name, _ in seen.attributes}
    assert not {"src", "href", "style", "srcset"}.intersection(names)
    assert not any(name.startswith("on") for name in names)
    assert "url(" not in page
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert ("content", policy) in seen.attributes
    assert len(page) < 400_000


def test_every_plot_is_well_formed_and_has_words(story: RunReport) -> None:
    for text in re.findall("<svg.*?</svg>", html.render_html(story, made=""), re.DOTALL):
        drawn = ElementTree.fromstring(text)
        assert drawn.get("aria-label") or drawn.get("aria-hidden")


@pytest.mark.parametrize("span_s", [36_000.0, 1e12])
def test_time_is_that_of_the_ledger(story: RunReport, span_s: float) -> None:
    """Neither a pause before the run was resumed nor a clock that leapt is time that it took."""
    summary = dataclasses.replace(story.summary, wall_s=span_s)
    assert summary.ledger is not None
    took = format_seconds(summary.ledger.wall_s)
    assert f" tokens in {took}" in render_text(summary).splitlines()[0]
    whole = dataclasses.replace(story, summary=summary)
    assert f" tokens in {took}. " in render.render_markdown(whole)
    assert format_seconds(span_s) not in html.render_html(whole, made="by a test")


def test_markdown_tells_the_same(story: RunReport) -> None:
    page = render.render_markdown(story)
    assert re.findall("^## (.*)$", page, re.MULTILINE) == [
        "Prediction and measurement", "Learning", "Where the time went", "Ranks", "Incidents", "Checkpoints",
        "Cost, energy and carbon", "Samples",
    ]  # fmt: skip
    assert re.search(r"^\| step \| 6\.65 s \([^|]*\) \| 6\.\d\d s \([^|]*\) \| [+-]0\.\d% \|$", page, re.MULTILINE)
    assert "- straggler: rank 2 (data 1, tensor 0, on host-1) is at work" in page


def hostile(run: Run) -> Run:
    """A run whose every text is somebody's attack."""
    plan = json.loads(run.plan_json.read_text())
    plan["job"]["model"]["name"] = plan["cluster"]["name"] = EVIL
    plan["bill"]["price_source"] = plan["bill"]["grid_source"] = EVIL
    plan["warnings"] = [EVIL, 3, None]
    run.plan_json.write_text(json.dumps(plan))
    run.set_launch(**{**run.launch(), "layout": EVIL})
    run.set_status(EVIL, message=EVIL)
    for path in (run.events(0), run.supervisor):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            event |= {
                key: EVIL for key in ("host", "reason", "text", "energy_source", "error", "source") if key in event
            }
            if event["event"] == "incident":
                event["cause"] = {"kind": EVIL, "message": EVIL}
            for member in event.get("members", ()):
                member["host"] = EVIL
        path.write_text("\n".join(map(json.dumps, events)) + "\n")
    return run


def test_hostile_texts_stay_text(tmp_path: Path) -> None:
    story = read_run_report(hostile(write_run(tmp_path, steps=60, straggler=1)))
    page = html.render_html(story, made=EVIL)
    seen = Seen(page)
    assert "script" not in seen.tags
    assert seen.open == []
    assert "\x1b" not in page
    told = render.render_markdown(story)
    assert "<script" not in told.replace("\\<script", "")
    assert "\x1b" not in told


def test_a_run_that_never_took_a_step(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=5, incidents=0)
    for rank in range(4):
        run.events(rank).unlink()
    story = read_run_report(run)
    assert '<p class="quiet">No step was finished.</p>' in html.render_html(story, made="")
    assert "No step was finished." in render.render_markdown(story)
    assert "Damage to the record" in html.render_html(story, made="")


@pytest.mark.parametrize("name", ["plan.json", "launch.json", "status.json", "supervisor.jsonl", "events-00000.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe" * 50, b"[]\n", b'{"event":[]}\n', b"null"])
def test_damaged_files_are_told_of(tmp_path: Path, name: str, content: bytes) -> None:
    run = write_run(tmp_path, ranks=2, steps=8, incidents=1, hosts=1)
    (run.path / name).write_bytes(content)
    story = read_run_report(run)
    Seen(html.render_html(story, made=""))
    render.render_markdown(story)


ODD = [None, True, -1, 0, 1e308, -1e308, 10**400, float("nan"), float("inf"), EVIL, [], {}, [1, 2], 2**70, 1e-320, 0.5]


def garbled(value: Any, chance: random.Random) -> Any:
    """A value of which something, somewhere, is not what it was."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        return {name: garbled(one, chance) if name == key else one for name, one in value.items()}
    if isinstance(value, list) and value and chance.random() < 0.7:
        index = chance.randrange(len(value))
        return [garbled(one, chance) if number == index else one for number, one in enumerate(value)]
    return chance.choice(ODD)


@pytest.mark.parametrize("seed", range(16))
def test_whatever_the_files_hold(tmp_path: Path, seed: int) -> None:
    run, chance = write_run(tmp_path, ranks=3, steps=20, straggler=1, hosts=1), random.Random(seed)
    for name in ("plan.json", "launch.json", "status.json"):
        value = json.loads((run.path / name).read_text())
        for _ in range(chance.choice([0, 1, 8])):
            value = garbled(value, chance)
        (run.path / name).write_text(json.dumps(value))
    for path in (run.events(0), run.events(1), run.supervisor):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for _ in range(chance.choice([0, 10, 100])):
            index = chance.randrange(len(events))
            events[index] = garbled(events[index], chance)
        path.write_text("\n".join(map(json.dumps, events)))
    story = read_run_report(run)
    assert "\x1b" not in html.render_html(story, made="") + render.render_markdown(story) + render_text(story.summary)
    watcher = Watcher(run)
    assert all(
        "\x1b" not in line.plain for line in frame(watcher.look(), watcher.remarks(), name="", width=80, height=50)
    )


# ---- plots -----------------------------------------------------------------------------------------------------------


def test_a_plot_with_holes_a_band_and_marks() -> None:
    line = PlotLine(label="a", x=[0, 1, 2, 3, 4], mean=[1.0, 2.0, None, 4.0, 5.0], low=[0.5] * 5, high=[6.0] * 5)
    drawn = line_plot("A & B", [line], show=axis_format(""), marks=[PlotMark(x=2, kind="incident", text="<x>")])
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") == "A & B: a from 1 to 5"
    kinds = [one.get("class") for one in root]
    assert kinds.count("line s1") == 2
    assert kinds.count("band s1") == 1
    assert [one[0].text for one in root if one.get("class") == "mark incident"] == ["<x>"]


@pytest.mark.parametrize("values", [[], [None], [float("nan"), float("inf")], [1e308, -1e308], [0.0, 0.0], [5e-324]])
def test_a_plot_of_odd_values(values: list[float | None]) -> None:
    drawn = line_plot("x", [PlotLine(label="a", x=list(range(len(values))), mean=values)], show=axis_format("s"))
    assert not drawn or ElementTree.fromstring(drawn) is not None
    assert "nan" not in drawn


def test_a_step_that_compiled_does_not_flatten_the_rest() -> None:
    line = PlotLine(label="a", x=list(range(100)), mean=[500.0] + [1.0 + 0.01 * number for number in range(99)])
    labels = re.findall('class="tick y"[^>]*>([^<]*)<', line_plot("x", [line], show=axis_format(""), rough=True))
    assert max(map(float, labels)) < 3


def test_a_bar_of_shares() -> None:
    root = ElementTree.fromstring(stacked_bar([("training steps", 3.0), ("lost work", 1.0)]))
    assert [one.get("class") for one in root] == ["part training-steps", "part lost-work"]
    assert [float(one.get("width", "")) for one in root] == [480.0, 160.0]
    assert stacked_bar([]) == ""
