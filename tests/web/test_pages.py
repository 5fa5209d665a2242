"""The dashboard in a real browser: it loads, streams, survives a reload, and works without a mouse."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from dashboard import Dashboard, dashboard
from peer_events import write_peer_events
from synthetic import write_run

from phalanx.record.events import EventWriter
from phalanx.record.run import Run

pytest.importorskip("uvicorn")

PATIENCE_MS = 120_000  # a busy machine is no reason to fail
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>"

# Every page: its address, and what is there once it is drawn.
PAGES = {
    "runs": ("#/", ".runs tbody tr"),
    "run": ("#/runs/alpha", ".charts .u-over >> nth=6"),
    "mesh": ("#/runs/alpha/mesh?rank=5", ".ramp"),
    "step": ("#/runs/alpha/step", ".span-plot canvas >> nth=1"),
    "ledger": ("#/runs/alpha/ledger", ".accounts .meter"),
    "plan": ("#/runs/alpha/plan", "text=Why not another layout"),
    "findings": ("#/runs/alpha/findings", ".finding >> nth=3"),
    "cost": ("#/runs/alpha/cost", ".cost-figures"),
    "peers": ("#/runs/slow/peers", ".peer-line rect >> nth=3"),
    "compare": ("#/compare?runs=alpha,beta&x=tokens", ".chart .u-over"),
    "damaged": ("#/runs/damaged", ".notice"),
}


@dataclass(kw_only=True)
class Visit:
    """A tab, and what it did that it should not have done."""

    page: Any
    url: str
    console: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def go(self, address: str, sight: str) -> None:
        """Open a page afresh and wait until it is drawn."""
        self.page.goto("about:blank")
        self.page.goto(self.url + address)
        self.see(sight)

    def see(self, sight: str) -> Any:
        """Wait until something can be seen."""
        found = self.page.locator(sight).first
        found.wait_for(timeout=PATIENCE_MS)
        return found

    def until(self, script: str) -> None:
        """Wait until an expression in the page is true; wait_for_function would need eval, which the page forbids."""
        self.wait_for(lambda: self.page.evaluate(script), script)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, while the page goes on, until a condition holds."""
        end = time.monotonic() + PATIENCE_MS / 1000
        while not condition():
            assert time.monotonic() < end, what
            self.page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root, name="alpha", ranks=8, steps=160, straggler=5)
    write_run(root, name="beta", ranks=4, steps=100, seed=3, incidents=0)
    write_peer_events(write_run(root, name="slow", ranks=1, steps=40, incidents=0).path)
    _damage(write_run(root, name="damaged", ranks=4, steps=60))
    _poison(write_run(root, name="hostile", ranks=4, steps=60, straggler=3))
    return root


def _damage(run: Run) -> None:
    run.events(2).write_bytes(run.events(2).read_bytes()[:9000] + b"\0\xff{torn\n\n{}\n")
    run.events(3).unlink()
    (run.path / "launch.json").write_text("{")


def _poison(run: Run) -> None:
    plan = json.loads(run.plan_json.read_text())
    plan["job"]["model"]["name"] = HOSTILE
    plan["alternatives"][0]["reason"] = HOSTILE
    run.plan_json.write_text(json.dumps(plan))
    run.supervisor.write_text(run.supervisor.read_text().replace("host-1", HOSTILE))


@pytest.fixture(scope="module")
def site(root: Path) -> Iterator[Dashboard]:
    with dashboard(root) as found:
        yield found
        assert found.complaints == []


@contextmanager
def visit(browser: Any, site: Dashboard, *, scheme: str = "light", width: int = 1440) -> Iterator[Visit]:
    """A fresh tab; at its end it has said nothing on the console and asked nobody but this machine."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    found = Visit(page=context.new_page(), url=site.url)
    found.page.on("console", lambda message: found.console.append(f"{message.type}: {message.text}"))
    found.page.on("pageerror", lambda error: found.console.append(f"error: {error}"))
    found.page.on("request", lambda request: _note(found, request.url))
    try:
        yield found
        assert found.console == []
        assert found.strangers == []
    finally:
        context.close()


def _note(found: Visit, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("about", "data") and not url.startswith(found.url):
        found.strangers.append(url)


def test_every_page_loads_is_accessible_and_fits_a_telephone(browser: Any, site: Dashboard, screenshots: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    violations = []
    with visit(browser, site, scheme="light") as tab:
        for name, (address, sight) in PAGES.items():
            tab.page.set_viewport_size({"width": 1440, "height": 900})
            tab.go(address, sight)
            for scheme, rules in (("dark", {"runOnly": ["color-contrast"]}), ("light", {})):
                # The themes differ in nothing but colours.
                tab.page.emulate_media(color_scheme=scheme)
                tab.until(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
                found = axe.run(tab.page, options={"resultTypes": ["violations"], **rules}).response["violations"]
                violations += [f"{name}, {scheme}: {one['id']}: {one['nodes'][0]['html']}" for one in found]
                if "PHALANX_SCREENSHOTS" in os.environ:  # a picture of every page takes longer than all else here
                    tab.page.screenshot(path=screenshots / f"{name}-{scheme}-1440.png", full_page=True)
            tab.page.set_viewport_size({"width": 420, "height": 900})
            tab.until("document.documentElement.scrollWidth <= innerWidth")
            if "PHALANX_SCREENSHOTS" in os.environ:
                tab.page.screenshot(path=screenshots / f"{name}-light-420.png", full_page=True)
    assert violations == []


def test_a_run_that_grows_is_followed_without_a_reload(browser: Any, site: Dashboard, root: Path) -> None:
    run = write_run(root, name="growing", ranks=2, steps=30, finished=False, incidents=0)
    with visit(browser, site) as tab:
        tab.go("#/runs/growing", "text=running, 30 of 60 steps")
        tab.see(".live[data-state=live]")
        tab.see(".chart >> text=Loss")
        tab.page.evaluate("window.kept = document.querySelector('.chart')")
        writer = EventWriter(run.events(0), rank=0)
        for step in range(30, 40):
            writer.write("step", step=step, loss=1.25, tokens=262144, duration_s=6.5, tokens_per_s=40000.0)
        writer.write("evaluate", step=40, loss=1.125, bits_per_byte=0.5, tokens=1000, seconds=1.0)
        writer.close()
        tab.see("text=running, 40 of 60 steps")
        tab.see("text=held-out loss 1.1250")
        tab.until("document.querySelector('.chart .value b').textContent === '1.250'")
        assert tab.page.evaluate("window.kept === document.querySelector('.chart')")  # drawn on, not drawn again
        run.set_status("done")
        tab.see("text=done, 40 of 60 steps")


def test_an_answer_older_than_the_news_is_asked_for_again(browser: Any, site: Dashboard, root: Path) -> None:
    run = write_run(root, name="overtaken", ranks=2, steps=30, finished=False, incidents=0)
    held: dict[str, Any] = {}
    let_through: list[str] = []

    def hold_the_first(route: Any) -> None:
        if (what := route.request.url.split("?")[0].rpartition("/")[2]) in held:
            let_through.append(what)
            route.continue_()
        else:
            held[what] = (route, route.fetch() if what == "curves" else None)

    with visit(browser, site) as tab:
        tab.page.route("**/api/runs/overtaken", hold_the_first)
        tab.page.route("**/curves?**", hold_the_first)
        tab.page.goto(tab.url + "#/runs/overtaken")
        # The curves of 30 steps are on their way; the header's question has not arrived yet.
        tab.wait_for(lambda: len(held) == 2, "both questions")
        writer = EventWriter(run.events(0), rank=0)
        writer.write("step", step=30, loss=1.25, tokens=262144, duration_s=6.5, tokens_per_s=40000.0)
        writer.close()
        held["overtaken"][0].continue_()
        tab.see("text=running, 31 of 60 steps")
        tab.wait_for(lambda: "overtaken" in let_through, "the header asked for again at the stream's first news")
        old, answer = held["curves"]
        old.fulfill(response=answer)
        tab.until("document.querySelector('.chart .value b')?.textContent === '1.250'")


def test_a_lost_connection_is_taken_up_again(browser: Any, site: Dashboard, root: Path) -> None:
    run = write_run(root, name="flaky", ranks=2, steps=30, finished=False, incidents=0)
    asked: list[str] = []

    def cut_the_first(route: Any) -> None:
        asked.append(route.request.url)
        if len(asked) == 1:
            route.fulfill(content_type="text/event-stream", body="retry: 100\n\n")
        else:
            route.continue_()

    with visit(browser, site) as tab:
        tab.page.route("**/stream", cut_the_first)
        tab.go("#/runs/flaky", "text=running, 30 of 60 steps")
        tab.see(".live[data-state=lost] >> text=connecting again")
        tab.see(".live[data-state=live]")
        writer = EventWriter(run.events(0), rank=0)
        writer.write("step", step=30, loss=1.25, tokens=262144, duration_s=6.5)
        writer.close()
        tab.see("text=running, 31 of 60 steps")
        assert len(asked) == 2


def test_what_is_looked_at_is_in_the_address_and_survives_a_reload(browser: Any, site: Dashboard) -> None:
    with visit(browser, site) as tab:
        tab.go(*PAGES["run"])
        box = tab.see(".charts .u-over").bounding_box()
        tab.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
        tab.page.mouse.up()
        tab.see("button:text('Whole run')")
        first, last = (int(re.search(rf"{key}=(\d+)", tab.page.url)[1]) for key in ("first", "last"))
        assert 30 < first < 50
        assert 70 < last < 90
        with tab.page.expect_request(lambda request: f"first={first}&last={last}" in request.url):
            tab.page.reload()
        tab.see("button:text('Whole run')").click()
        tab.see("button:text('Whole run')[hidden] >> xpath=.. >> nth=0")
        assert "first=" not in tab.page.url
        tab.page.get_by_role("button", name="Time").click()
        tab.page.reload()
        tab.see("button[data-key=time][aria-pressed=true]")


def test_the_keyboard_alone_reaches_everything(browser: Any, site: Dashboard) -> None:
    with visit(browser, site) as tab:
        tab.go(*PAGES["run"])
        keys = tab.page.keyboard
        keys.press("Tab")
        assert tab.page.evaluate("document.activeElement.id") == "skip"
        keys.press("Enter")
        assert tab.page.evaluate("document.activeElement.id") == "main"
        keys.press("?")
        tab.see("dialog[open] >> text=all runs")
        keys.press("Escape")
        keys.press("2")
        tab.see(".ramp")
        tab.page.locator(".heat canvas").focus()
        keys.press("ArrowDown")
        keys.press("ArrowDown")
        tab.see("text=/rank 2, data 1, tensor 0, host-0, step \\d+: \\d/")
        keys.press("Enter")
        tab.see(".side >> text=Rank 2")
        assert "rank=2" in tab.page.url
        assert tab.page.locator(".side .peers button").all_inner_texts() == ["3", "0", "4", "6"]
        keys.press("t")
        keys.press("t")
        tab.page.reload()
        assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
        tab.see(".side >> text=Rank 2")
        keys.press("/")
        tab.see("#filter:focus")


def test_runs_are_filtered_sorted_and_compared(browser: Any, site: Dashboard) -> None:
    with visit(browser, site) as tab:
        tab.go(*PAGES["runs"])
        tab.page.fill("#filter", "alpha")
        tab.until("document.querySelectorAll('.runs tbody tr').length === 1")
        tab.page.get_by_label("Compare alpha").check()
        tab.page.fill("#filter", "")
        tab.page.get_by_role("button", name="Run", exact=True).click()
        assert tab.page.locator(".runs tbody th a").first.inner_text() == "alpha"
        tab.page.get_by_label("Compare beta").check()
        tab.page.get_by_role("button", name="Compare 2 runs").click()
        tab.see(".chart .u-over")
        assert tab.page.locator("tbody th a").all_inner_texts() == ["alpha", "beta"]
        tab.page.get_by_role("button", name="Time").click()
        tab.see(".chart .u-over")
        box = tab.see(".chart .u-over").bounding_box()
        tab.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 50)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60, steps=4)
        with tab.page.expect_response(re.compile(r"/api/runs/beta/curves\?names=loss&first=\d+&last=\d+")):
            tab.page.mouse.up()
        tab.see("button:text('Whole runs')").click()
        tab.page.get_by_label("Series").select_option("tokens_per_s")
        tab.see("figcaption >> text=Tokens per second")


def test_html_in_a_record_stays_text(browser: Any, site: Dashboard) -> None:
    with visit(browser, site) as tab:
        pages = {"": ".charts .u-over", "/mesh?rank=3": ".ramp", "/plan": "text=Why not", "/findings": "text=TEL004"}
        for address, sight in pages.items():
            tab.go(f"#/runs/hostile{address}", sight)
            tab.see(f"text={HOSTILE}")
            assert tab.page.locator("main img, main b >> text=bold").count() == 0
        assert HOSTILE in tab.page.locator("[data-group=TEL]").inner_text()  # a host's name


def test_what_is_missing_is_said_in_words(browser: Any, site: Dashboard, tmp_path: Path) -> None:
    with visit(browser, site) as tab:
        tab.go("#/runs/damaged", ".notice")
        assert "launch.json" in tab.see(".notice li").inner_text()
        tab.go("#/runs/damaged/mesh?rank=2", ".ramp")
        tab.see(".notice >> text=lines that are no events")
        with tab.page.expect_response("**/api/runs/absent"):
            tab.go("#/runs/absent", "[role=alert]")
        assert "absent" in tab.see("[role=alert]").inner_text()
        tab.console.clear()  # the browser itself complains of every 404
    with dashboard(tmp_path) as empty, visit(browser, empty) as tab:
        tab.go("#/", "text=There are no runs here yet")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_findings_show_what_is_broken_what_it_costs_and_its_cure(
    browser: Any, site: Dashboard, screenshots: Path, scheme: str
) -> None:
    with visit(browser, site, scheme=scheme) as tab:
        tab.go("#/runs/alpha/findings", "[data-group=TEL]")
        slow = tab.page.locator("article.finding", has_text="TEL004 stragglers-named")
        assert "rank 5" in slow.inner_text()
        assert "Fix:" in slow.inner_text()
        assert "points of effective training time" in slow.inner_text()
        assert not tab.page.locator(".verdict[data-verdict=pass]").count()
        slow.locator("summary").click()
        tab.see("text=How it is checked")
        tab.page.screenshot(path=screenshots / f"findings-{scheme}.png", full_page=True)
        tab.see(".figures >> text=Specification")
        tab.page.get_by_role("button", name="Passed").click()
        tab.see(".verdict[data-verdict=pass]")
        assert "show=pass" in tab.page.url
        tab.page.reload()
        tab.see(".verdict[data-verdict=pass]")
        assert not tab.page.locator(".verdict[data-verdict=fail]").count()
