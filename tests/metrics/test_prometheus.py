"""/metrics over real sockets, and a real Prometheus server that scrapes it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from phalanx.errors import SystemFailure, UserError
from phalanx.io.listen import Address
from phalanx.metrics.names import METRICS, grafana_dashboard
from phalanx.metrics.prometheus import MOST_REQUESTS, MetricsServer, exposition_text
from phalanx.metrics.readings import Readings
from phalanx.record.run import Run

HERE = Address(host="127.0.0.1", port=0)
TOKEN = "a-token-of-some-length"


def tool(name: str) -> str:
    """Debian's binary, from PATH or beside python, where .ci/packages puts it."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed: make test fetches it where apt-get works (.ci/packages)")
    return found


def get(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def server(finished: Run) -> Iterator[MetricsServer]:
    with MetricsServer(Readings(finished), HERE) as made:
        yield made


def test_exposition_holds_every_series_with_its_labels(finished: Run) -> None:
    readings = Readings(finished)
    families = {one.name: one for one in text_string_to_metric_families(exposition_text(readings))}
    exported = {one.metric.name for one in readings.points()}
    for metric in METRICS:
        if metric.name in exported:
            family = families[metric.prometheus.removesuffix("_total")]
            assert family.type == metric.kind
            assert all(set(sample.labels) == {"run", *metric.labels} for sample in family.samples)


def test_the_name_of_a_run_does_not_act_on_a_terminal(finished: Run, tmp_path: Path) -> None:
    (tmp_path / "r\x1b[2J\x9b").symlink_to(finished.path, target_is_directory=True)
    text = exposition_text(Readings(Run(path=tmp_path / "r\x1b[2J\x9b")))
    assert 'run="r [2J "' in text
    assert text.replace("\n", "").isprintable()


def test_scrape(server: MetricsServer) -> None:
    status, text = get(server.url)
    assert status == 200
    assert 'train_step{run="first"} 120.0' in text
    assert get(server.url.replace("/metrics", "/"))[0] == 404
    assert get(server.url, Accept="application/openmetrics-text")[1].endswith("# EOF\n")


def test_a_foreign_name_is_refused(server: MetricsServer) -> None:
    """DNS rebinding: a page under evil.example must not read what its visitor's machine serves."""
    assert get(server.url, Host="evil.example")[0] == 421
    assert get(server.url, Host=f"localhost:{server.address.port}")[0] == 200


def test_only_reading(server: MetricsServer) -> None:
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(server.url, method=method, data=b"x")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=120)
        assert caught.value.code == 501
        caught.value.close()


def test_token(finished: Run) -> None:
    with MetricsServer(Readings(finished), HERE, token=TOKEN) as made:
        assert get(made.url)[0] == 401
        assert get(made.url, Authorization="Bearer wrong")[0] == 401
        assert get(made.url, Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(made.url, Authorization=f"Bearer {TOKEN}", Host="node-7.example")[0] == 200


def test_other_machines_need_a_token(finished: Run) -> None:
    with pytest.raises(UserError) as caught:
        MetricsServer(Readings(finished), Address(host="0.0.0.0", port=0))
    assert str(caught.value) == (
        "--listen 0.0.0.0:0: this address can be reached from other machines, and there is no token\n"
        "  everybody who reaches it could read the run\n"
        "  add --token auto, or listen on 127.0.0.1 and come in through ssh -L"
    )


def test_a_port_in_use(server: MetricsServer, finished: Run) -> None:
    with pytest.raises(SystemFailure) as caught:
        MetricsServer(Readings(finished), server.address)
    assert "cannot listen there: address already in use" in str(caught.value)


def test_silent_clients_leave_room_for_others(server: MetricsServer) -> None:
    """Half the places held by clients that say nothing; the end does not wait for them either."""
    port = server.address.port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_REQUESTS // 2)]
    try:
        assert get(server.url)[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_failure_is_an_answer(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = Readings(finished)
    monkeypatch.setattr(readings, "points", lambda: 1 / 0)
    with MetricsServer(readings, HERE) as made:
        assert get(made.url) == (500, "the run cannot be read: ZeroDivisionError: division by zero\n")


def test_a_damaged_run_is_served(damaged: Run) -> None:
    with MetricsServer(Readings(damaged), HERE) as made:
        status, text = get(made.url)
    assert status == 200
    assert "train_record_damage" in text


# ---- the dashboard ---------------------------------------------------------------------------------------------------


def queries() -> list[str]:
    """Every PromQL text of the dashboard, with Grafana's variables filled in."""
    board = json.loads(grafana_dashboard())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    found += [one["expr"] for one in board["annotations"]["list"]]
    found += [
        one["definition"].removeprefix("label_values(").partition(",")[0] for one in board["templating"]["list"][1:]
    ]
    filled = {"$run": ".*", "$__rate_interval": "1m", "$__interval": "1m"}
    for name, value in filled.items():
        found = [one.replace(name, value) for one in found]
    return found


WORDS = {"by", "on", "or", "and", "unless", "without", "ignoring", "group_left", "group_right", "bool", "offset"}


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """Names of series in a query, and the labels each is asked for or grouped by."""
    bare = re.sub(r'"[^"]*"', '""', query)
    grouped = {
        label.strip()
        for group in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", bare)
        for label in group.split(",")
    }
    rest = re.sub(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)|\[[^]]*\]", " ", bare)
    found = []
    for match in re.finditer(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(\s*\()?", rest):
        name, labels, call = match.groups()
        if not call and name not in WORDS:
            found.append((name, set(re.findall(r"(\w+)\s*[=!]", labels or "")) | grouped))
    return found


def test_every_query_asks_for_what_is_exported() -> None:
    known = {one.prometheus: {"run", *one.labels} for one in METRICS}
    assert len(queries()) > 50
    for query in queries():
        asked = selectors(query)
        assert asked, query
        for name, labels in asked:
            assert name in known, f"{name} in {query}"
            assert labels <= known[name] | {"run"}, f"{labels - known[name]} in {query}"


def test_every_series_is_on_the_dashboard() -> None:
    asked = {name for query in queries() for name, _ in selectors(query)}
    assert {one.prometheus for one in METRICS} - asked == set()


def test_legends_name_labels_that_are_there() -> None:
    known = {one.prometheus: {"run", *one.labels} for one in METRICS}
    for panel in json.loads(grafana_dashboard())["panels"]:
        for target in panel.get("targets", ()):
            there = set().union(*(known[name] for name, _ in selectors(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))) <= there, target["expr"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(grafana_dashboard())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


# ---- with the real thing ---------------------------------------------------------------------------------------------


def test_promtool_finds_nothing_to_mend(finished: Run) -> None:
    text = exposition_text(Readings(finished))
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@contextmanager
def prometheus(folder: Path, target: Address, token: str) -> Iterator[str]:
    """A real server that scrapes `target` every few seconds; yields its address."""
    (folder / "token").write_text(token)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 4s, scrape_timeout: 4s}\n"
        "scrape_configs:\n"
        "- job_name: phalanx\n"
        f"  authorization: {{credentials_file: {folder / 'token'}}}\n"
        f"  static_configs: [{{targets: ['{target}']}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        tool("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


def ask(server: str, query: str) -> Any:
    status, text = get(f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    answer = json.loads(text)
    assert (status, answer["status"]) == (200, "success"), f"{query}: {text}"
    return answer["data"]["result"]


def ask_for_one(server: str, query: str) -> Any:
    """The only series of an answer. After a scrape that took too long there is none until the next."""
    for _ in range(1200):
        if found := ask(server, query):
            break
        time.sleep(0.1)
    (series,) = found
    return series


def until_scraped(server: str) -> None:
    for _ in range(1200):
        try:
            if ask(server, "train_step"):
                return
        except (OSError, ValueError):
            pass  # not up yet, or up and says so: "Service Unavailable" is no JSON
        time.sleep(0.1)
    raise AssertionError("Prometheus scraped nothing in 120 s")


def test_a_real_prometheus_scrapes_and_answers_every_query(finished: Run, tmp_path: Path) -> None:
    with (
        MetricsServer(Readings(finished), HERE, token=TOKEN) as metrics,
        prometheus(tmp_path, metrics.address, TOKEN) as server,
    ):
        until_scraped(server)
        for one in Readings(finished).points():  # its own: the server's thread reads the other one every second
            labels = ",".join(f'{name}="{value}"' for name, value in zip(one.metric.labels, one.labels, strict=True))
            found = ask_for_one(server, f'{one.metric.prometheus}{{run="first",{labels}}}')
            assert float(found["value"][1]) == pytest.approx(one.value, rel=1e-6), one
        for query in queries():
            ask(server, query)
        energy = ask_for_one(server, 'train_energy_joules{horizon="so_far"} / on (run) train_tokens_total')
        assert float(energy["value"][1]) > 0
