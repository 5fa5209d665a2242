"""teams.toml: the kinds of nodes of a cluster, the teams that share them, and their shares."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, UserError, nearest
from phalanx.io.toml import TomlFile, read_toml
from phalanx.launch.kube.settings_check import IMAGE, LABEL, NAMESPACE

HOSTNAME = "kubernetes.io/hostname"  # the narrowest level of every topology
DEVICE = "nvidia.com/gpu"
PREFLIGHT = "phalanx.preflight"  # key of the taint and the label of nodes that join
KEYS = ("name", "namespace", "image", "topology", "device", "balloons", "prometheus", "priorities", "flavours", "teams")
FLAVOUR_KEYS = ("nodes", "labels", "resources")
TEAM_KEYS = ("namespace", "share", "most", "weight", "groups", "users")
PRIORITIES = {"low": -100, "normal": 0, "high": 100}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFlavour:
    """Nodes of one kind."""

    name: str
    nodes: int
    labels: Mapping[str, str]  # labels that such nodes have
    resources: Mapping[str, float]  # counted resources of one node: devices, cpu, RDMA interfaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """A team that shares the cluster."""

    name: str
    namespace: str
    share: Mapping[str, int]  # nodes of each flavour that it owns: lent while idle, reclaimed when needed
    most: Mapping[str, int]  # nodes of each flavour that it may use, including borrowed ones; else all
    weight: float  # weight when several teams borrow
    groups: tuple[str, ...]
    users: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Teams:
    """The contents of a teams.toml."""

    name: str
    namespace: str  # of the operator's pods
    image: str
    topology: tuple[str, ...]  # node labels, the widest first, without the host name
    device: str
    balloons: int  # idle nodes of each flavour that are kept from the autoscaler
    prometheus: bool
    priorities: Mapping[str, int]
    flavours: tuple[NodeFlavour, ...]
    teams: tuple[Team, ...]


def read_teams(path: Path) -> Teams:
    """Read teams.toml; raises UserError with all its mistakes."""
    reader = _TeamReader(read_toml(path, noun="teams file"))
    teams = reader.read()
    if reader.problems:
        raise UserError(list(dict.fromkeys(reader.problems)))
    return teams


class _TeamReader:
    """A reader of the file's values that collects their mistakes."""

    def __init__(self, file: TomlFile) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def wrong(self, *key: str, what: str, fix: str) -> None:
        self.problems.append(Problem(where=self.file.where(*key), what=what, fix=fix))

    def read(self) -> Teams:
        table = self.file.table
        self._known(table, KEYS)
        flavours = tuple(self._flavour(name, values) for name, values in self._tables("flavours").items())
        teams = tuple(
            self._team(name, values, {item.name for item in flavours}) for name, values in self._tables("teams").items()
        )
        for kind, items, example in (("flavours", flavours, "[flavours.h100]"), ("teams", teams, "[teams.nlp]")):
            if not items:
                self.wrong(
                    kind, what=f"there are no {kind}", fix=f"such as {example}; docs/launch-operator.md has a file"
                )
        for flavour in flavours:
            owned = sum(team.share.get(flavour.name, 0) for team in teams)
            if owned > flavour.nodes:
                what = f"teams own {owned} nodes of {flavour.name}, but there are {flavour.nodes}"
                fix = "shares add up to the nodes at most; what a team may borrow needs no share"
                self.wrong("flavours", flavour.name, what=what, fix=fix)
        spaces = [team.namespace for team in teams]
        if duplicates := sorted({item for item in spaces if spaces.count(item) > 1}):
            self.wrong("teams", what=f"two teams have the namespace {duplicates[0]}", fix="give each one of its own")
        return Teams(
            name=self._name((), table.get("name", "cluster"), "name"),
            namespace=self._name((), table.get("namespace", "phalanx-system"), "namespace"),
            image=self._text((), table, "image", IMAGE, "registry.example/phalanx:0.7"),
            topology=self._labels(table.get("topology", [])),
            device=self._text((), table, "device", LABEL, DEVICE, default=DEVICE),
            balloons=self._whole((), table, "balloons", 0),
            prometheus=bool(table.get("prometheus", True)),
            priorities=self._priorities(table.get("priorities", PRIORITIES)),
            flavours=flavours,
            teams=teams,
        )

    def _tables(self, key: str) -> dict[str, dict[str, Any]]:
        tables = self.file.table.get(key, {})
        if not isinstance(tables, dict) or not all(isinstance(sub_table, dict) for sub_table in tables.values()):
            self.wrong(key, what=f"{key} must be tables", fix=f"such as [{key}.NAME]")
            return {}
        for name in tables:
            self._name((key,), name, name)
        return tables

    def _known(self, table: Mapping[str, Any], keys: tuple[str, ...], *path: str) -> None:
        for key in table:
            if key not in keys:
                suggestion = nearest(key, keys)
                fix = f'did you mean "{suggestion}"?' if suggestion else f"the keys are {', '.join(keys)}"
                self.wrong(*path, key, what=f'there is no key "{key}" here', fix=fix)

    def _flavour(self, name: str, values: dict[str, Any]) -> NodeFlavour:
        path = ("flavours", name)
        self._known(values, FLAVOUR_KEYS, *path)
        labels = values.get("labels", {})
        if (
            not isinstance(labels, dict)
            or not all(isinstance(label_value, str) for label_value in labels.values())
            or not labels
        ):
            self.wrong(*path, what="labels must say which nodes these are", fix='such as labels = { "gpu" = "h100" }')
            labels = {}
        for label in labels:
            if not LABEL.fullmatch(label):
                self.wrong(*path, "labels", what=f"{label[:60]!r} is no label of a node", fix="such as gpu")
        resources: dict[str, float] = {}
        resource_table = values.get("resources", {})
        for key, value in resource_table.items() if isinstance(resource_table, dict) else ():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                self.wrong(*path, "resources", what=f"{key} must be a number of one node", fix="such as 8")
            else:
                resources[key] = float(value)
        if not resources:
            fix = 'such as resources = { "nvidia.com/gpu" = 8, cpu = 96 }'
            self.wrong(*path, what="resources must say what one node has", fix=fix)
        return NodeFlavour(
            name=name, nodes=self._whole(path, values, "nodes", None), labels=labels, resources=resources
        )

    def _team(self, name: str, values: dict[str, Any], flavours: set[str]) -> Team:
        path = ("teams", name)
        self._known(values, TEAM_KEYS, *path)
        weight = values.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
            self.wrong(*path, "weight", what=f"weight {weight!r} must be above 0", fix="such as 1")
            weight = 1.0
        return Team(
            name=name,
            namespace=self._name(path, values.get("namespace", name), "namespace"),
            share=self._nodes(path, values, "share", flavours),
            most=self._nodes(path, values, "most", flavours),
            weight=float(weight),
            groups=self._words(path, values, "groups"),
            users=self._words(path, values, "users"),
        )

    def _nodes(self, path: tuple[str, ...], values: dict[str, Any], key: str, flavours: set[str]) -> dict[str, int]:
        counts = values.get(key, {})
        if not isinstance(counts, dict):
            self.wrong(
                *path, key, what=f"{key} must name nodes of each flavour", fix=f"such as {key} = {{ h100 = 32 }}"
            )
            return {}
        for flavour in counts:
            if flavour not in flavours:
                suggestion = nearest(flavour, flavours)
                fix = (
                    f"did you mean {suggestion}?"
                    if suggestion
                    else f"the flavours are {', '.join(sorted(flavours)) or 'none'}"
                )
                self.wrong(*path, key, what=f"there is no flavour {flavour!r}", fix=fix)
        return {flavour: self._whole((*path, key), counts, flavour, 0) for flavour in counts if flavour in flavours}

    def _whole(self, path: tuple[str, ...], values: dict[str, Any], key: str, default: int | None) -> int:
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**6:
            problem = "is missing" if value is None else f"{value!r} must be a whole number, 0 or more"
            self.wrong(*path, key, what=f"{key} {problem}", fix=f"such as {key} = 16")
            return 0
        return value

    def _words(self, path: tuple[str, ...], values: dict[str, Any], key: str) -> tuple[str, ...]:
        names = values.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) and 0 < len(name) < 200 for name in names):
            self.wrong(*path, key, what=f"{key} must be a list of names", fix=f'such as {key} = ["nlp@example.org"]')
            return ()
        return tuple(names)

    def _name(self, path: tuple[str, ...], value: object, key: str) -> str:
        if not isinstance(value, str) or not NAMESPACE.fullmatch(value):
            self.wrong(*path, key, what=f"{str(value)[:60]!r} is no name", fix="lower case, digits and dashes")
            return "x"
        return value

    def _text(
        self,
        path: tuple[str, ...],
        values: Mapping[str, Any],
        key: str,
        pattern: re.Pattern[str],
        example: str,
        *,
        default: str = "",
    ) -> str:
        value = values.get(key, default)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            problem = f"{key} is missing" if value == "" else f"{str(value)[:60]!r} is no {key}"
            self.wrong(*path, key, what=problem, fix=f'such as {key} = "{example}"')
            return ""
        return value

    def _labels(self, found: object) -> tuple[str, ...]:
        if not isinstance(found, list) or not all(isinstance(label, str) and LABEL.fullmatch(label) for label in found):
            self.wrong(
                "topology", what="topology must be labels of nodes", fix='such as ["topology/block", "topology/rack"]'
            )
            return ()
        return tuple(label for label in found if label != HOSTNAME)

    def _priorities(self, found: object) -> dict[str, int]:
        if not isinstance(found, dict) or not all(
            type(priority) is int and abs(priority) < 10**9 for priority in found.values()
        ):
            self.wrong("priorities", what="priorities must be whole numbers", fix="such as high = 100")
            return {}
        for name in found:
            self._name(("priorities",), name, name)
        return {str(name): value for name, value in found.items()}
