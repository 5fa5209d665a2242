"""A cluster of sites: `[[site]]` in a cluster file, each a whole cluster behind a slow link.

version = 1
name = "two-cities"

[[site]]
name = "amsterdam"
devices = "8xH100:1"      # any cluster spec, or the path of a cluster file
up_mbit_s = 500           # of the whole site
down_mbit_s = 1000
latency_ms = 40           # round trip to the other sites
loss = 0.001              # share of packets that are lost; optional
client_only = false       # true: it accepts no connections (NAT); optional
congestion = "cubic"      # or "bbr", which does not slow down for loss: net.ipv4.tcp_congestion_control; optional
session_h = 4             # mean hours it stays, for `phalanx sim --days`; optional, for ever by default
absence_h = 1             # mean hours it is away between sessions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from phalanx.errors import Problem, UserError
from phalanx.hardware.catalog import NumberField, read_numbers, unknown_keys
from phalanx.hardware.types import Cluster, Site
from phalanx.io.limits import MAX_SITES
from phalanx.io.toml import TomlFile, read_toml
from phalanx.units import HOUR_S

MBIT = 1e6 / 8
NUMBERS = (
    # 1 kbit/s: a smaller number is more likely a mistake in the unit than a link.
    NumberField(key="up_mbit_s", attribute="up_bytes_per_s", scale=MBIT, least=1e-3, most=1e7, required=True),
    NumberField(key="down_mbit_s", attribute="down_bytes_per_s", scale=MBIT, least=1e-3, most=1e7, required=True),
    NumberField(key="latency_ms", attribute="latency_s", scale=1e-3, most=60_000, required=True),
    NumberField(key="loss", attribute="loss", most=0.5),
    NumberField(key="session_h", attribute="session_s", scale=HOUR_S),
    NumberField(key="absence_h", attribute="absence_s", scale=HOUR_S),
)
HEAD = ("version", "name", "site")
KEYS = ("name", "devices", "client_only", "congestion", *(field.key for field in NUMBERS))
EXAMPLE = 'name = "amsterdam", devices = "8xH100:1", up_mbit_s = 500, down_mbit_s = 1000, latency_ms = 40'


def cluster_of_sites(
    file: TomlFile, *, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None
) -> Cluster:
    """Read the cluster of a file with `[[site]]`; raises UserError with every mistake, each with file:line."""
    table, entries = file.table, file.table["site"]
    fix = 'write it into a cluster file of its own and name that: devices = "blue.toml"'
    problems = [
        Problem(where=file.where(key), what=f"{key} does not belong beside [[site]]", fix=fix)
        for key in table
        if key in ("accelerator", "domains", "domain_devices", "host_devices")
    ]
    reported_places = {problem.where for problem in problems}
    problems += [
        problem
        for problem in unknown_keys(table, HEAD, lambda key: file.where(key))
        if problem.where not in reported_places
    ]
    version, name = table.get("version", 1), table.get("name", file.path.stem)
    if version != 1 or isinstance(version, bool):
        what = f"version = {str(version)[:20]} is not one this Phalanx reads"
        problems.append(Problem(where=file.where("version"), what=what, fix="write version = 1"))
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        problems.append(Problem(where=file.where("name"), what="name is not a short text", fix='name = "two-cities"'))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        problems.append(Problem(where=file.where("site"), what="site is not a list of tables", fix="[[site]] for each"))
        raise UserError(problems)
    if not 2 <= len(entries) <= MAX_SITES:
        fix = f"write 2 to {MAX_SITES:,} [[site]]; one alone is a cluster without slow links"
        problems.append(Problem(where=file.where("site"), what=f"has {len(entries):,} [[site]]", fix=fix))
    sites: list[Site] = []
    for number, entry in enumerate(entries[:MAX_SITES]):
        site, complaints = _read_site(file, number, entry, files=files, environ=environ)
        if site is not None and site.name in {problem.name for problem in sites}:
            what, fix = f"two sites are named {site.name!r}", "give each its own name: tables and records go by it"
            complaints.append(Problem(where=file.where("site", number, "name"), what=what, fix=fix))
        elif site is not None:
            sites.append(site)
        problems += complaints
    if not problems and all(site.client_only for site in sites):
        why = "a peer that accepts no connections averages nothing: somebody must"
        fix = "remove client_only from one site"
        problems.append(Problem(where=file.where("site"), what="every site is client_only", why=why, fix=fix))
    if problems:
        raise UserError(problems)
    return dataclasses.replace(sites[0].cluster, name=str(name), sites=tuple(sites), source=str(file.path))


def _read_site(
    file: TomlFile,
    number: int,
    entry: Mapping[str, object],
    *,
    files: Sequence[Path],
    environ: Mapping[str, str] | None,
) -> tuple[Site | None, list[Problem]]:
    """Read one site, or return the problems with it."""
    from phalanx.hardware.cluster import resolve_cluster

    def where(key: str) -> str:
        return file.where("site", number, key)

    problems = unknown_keys(entry, KEYS, where)
    numbers, complaints = read_numbers(entry, NUMBERS, where)
    problems += complaints
    name, spec, client_only = entry.get("name"), entry.get("devices"), entry.get("client_only", False)
    if not isinstance(name, str) or not 0 < len(name.strip()) <= 63:
        problems.append(Problem(where=where("name"), what="the site has no short name", fix='write name = "amsterdam"'))
    if not isinstance(client_only, bool):
        what = f"client_only = {str(client_only)[:20]} is neither true nor false"
        problems.append(Problem(where=where("client_only"), what=what, fix="write true where NAT hides the site"))
    congestion = entry.get("congestion", "cubic")
    if congestion not in ("cubic", "bbr"):
        what = f"congestion = {str(congestion)[:20]!r} is neither cubic nor bbr"
        fix = (
            'write "cubic" for reno and others that slow down for loss; sysctl net.ipv4.tcp_congestion_control says it'
        )
        problems.append(Problem(where=where("congestion"), what=what, fix=fix))
    if numbers.get("absence_s") and not numbers.get("session_s"):
        what = "absence_h without session_h: the site never leaves"
        problems.append(Problem(where=where("absence_h"), what=what, fix="add session_h, or leave absence_h out"))
    if not isinstance(spec, str):
        problems.append(Problem(where=where("devices"), what="devices is missing", fix=f"a site is {EXAMPLE}"))
        return None, problems
    try:
        if spec.strip().endswith(".toml") and "site" in read_toml(file.path.parent / spec.strip()).table:
            # Checked before it is read as a cluster: a file that names itself would recurse without end.
            what = f"devices = {spec[:60]!r} has sites of its own"
            return None, [*problems, Problem(where=where("devices"), what=what, fix="list all sites in one file")]
        cluster = resolve_cluster(spec, base=file.path.parent, files=files, environ=environ)
    except UserError as error:
        # The spec's own message, at the line of the spec, unless it is about another file.
        problems += [
            dataclasses.replace(problem, where=f"{where('devices')}: {problem.where}") for problem in error.problems
        ]
        return None, problems
    if problems:
        return None, problems
    assert isinstance(name, str)
    kind: Literal["cubic", "bbr"] = "bbr" if congestion == "bbr" else "cubic"
    site = Site(name=name.strip(), cluster=cluster, client_only=bool(client_only), congestion=kind, **numbers)
    return site, []
