"""The table of exported series: names by the rules of OpenTelemetry and Prometheus, every source there is."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.metrics import names
from phalanx.metrics.names import METRICS
from phalanx.record.archive.series import SERIES

ALLOWED_UNITS = {"", "1", "s", "By", "J", "W", "Cel", "g", "USD"}


def test_names_are_unique_and_well_formed() -> None:
    assert len({one.name for one in METRICS}) == len(METRICS)
    assert len({one.prometheus for one in METRICS}) == len(METRICS)
    for one in METRICS:
        assert re.fullmatch(r"(train|hw|process)(\.[a-z][a-z0-9_]*)+", one.name), one.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", one.prometheus), one.prometheus
        assert all(re.fullmatch(r"[a-z]+", label) for label in one.labels)
        assert one.help
        assert one.source


def test_units_are_ucum_and_end_the_prometheus_name() -> None:
    for one in METRICS:
        assert one.unit in ALLOWED_UNITS or re.fullmatch(r"\{[a-z]+\}(/s)?", one.unit), one.name
        word = names.WORDS.get(one.unit, "")
        assert one.prometheus.removesuffix("_total").endswith(word), one.prometheus
        assert one.prometheus.endswith("_total") == (one.kind == "counter")


def test_fields_are_fields_of_the_record() -> None:
    known = {(series.event, series.field) for series in SERIES}
    for one in (*names.STEP, *names.RANK_STEP, *names.GPU, *names.CPU, *names.ANY_DEVICE, names.ENERGY):
        assert (one.source, one.field) in known, one.name


def test_every_metric_of_the_module_is_in_the_table() -> None:
    here = [value for value in vars(names).values() if isinstance(value, names.Metric)]
    groups = [value for value in vars(names).values() if isinstance(value, tuple)]
    here += [one for group in groups for one in group if isinstance(one, names.Metric)]
    assert {one.name for one in here} == {one.name for one in METRICS}


def test_the_page_lists_exactly_these_series() -> None:
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    rows = re.findall(r"^\| `((?:train|hw|process)\.[\w.]+)` \| (\S+) \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert rows == [(one.name, one.unit or "–", one.prometheus) for one in METRICS]
