"""Launch settings from the command line, the job and launch.toml, in this order of precedence.

launch.toml is searched for in ~/.config/phalanx (XDG_CONFIG_HOME), then in /etc/xdg/phalanx (XDG_CONFIG_DIRS). It has
the keys of the job's [launch] and `preamble`, lines of shell, which a job may not have: the user or the site owns this
file.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.io.path_probes import is_file
from phalanx.io.toml import TomlFile, read_toml
from phalanx.job.key_rules import AUTO, WrongValue, rule_of, texts
from phalanx.job.run_sections import LaunchChoice

FILE = "launch.toml"
SYSTEMS = ("local", "slurm", "k8s")
FLAVOURS = ("jobset", "trainjob", "podgroup", "job", "skypilot", "dstack")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
MODULE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+/-]{0,199}")
OPTION = re.compile(r"--[a-z][a-z-]{1,40}(=[0-9A-Za-z._,:@=+%&|*!\[\]()/-]{1,200})?")
# Options of sbatch that Phalanx sets and depends on.
OWN_OPTIONS = (
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "output", "error", "array", "signal", "requeue", "no-requeue"),
    *("open-mode", "chdir", "time", "comment", "wrap", "parsable", "test-only", "no-kill", "wait"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """The merged settings; None and empty where no source sets a value."""

    on: str = "local"
    queue: str = ""
    account: str = ""
    qos: str = ""
    hosts: int | None = None
    time_s: float | None = None
    interface: str = ""
    python: str = ""
    modules: tuple[str, ...] = ()
    image: str = ""
    mounts: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    preamble: tuple[str, ...] = ()  # lines of shell, only from launch.toml
    # Kubernetes; launch/k8s.py
    flavour: str = ""
    namespace: str = ""
    claim: str = ""
    topology: tuple[str, ...] = ()
    placement: str = ""
    rdma: str = ""
    host_network: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteFile:
    """A launch.toml: the keys of [launch], and lines of shell."""

    launch: LaunchChoice
    preamble: tuple[str, ...] = field(
        default=(), metadata=texts("lines of shell that come first on every host", key="preamble")
    )


def launch_settings(job: LaunchChoice, environ: Mapping[str, str], **chosen: Any) -> LaunchSettings:
    """Merge `chosen` from the command line, the job's [launch], the user's launch.toml and the site's, in this order.

    Raises UserError for a value that no launch system could accept.
    """
    site_files_read = [read_site_file(path) for path in site_files(environ)]
    sources = [job, *(site_file.launch for site_file in site_files_read)]
    values = {name: value for name, value in chosen.items() if value not in (None, "", ())}
    _check_chosen(values)
    for name in (item.name for item in fields(LaunchChoice)):
        set_values = [value for source in sources if (value := getattr(source, name)) not in ("", (), AUTO, False)]
        if set_values and name not in (*values, "environ"):
            values[name] = set_values[0]
    preambles = [site_file.preamble for site_file in site_files_read if site_file.preamble]
    # Variables add up: a site's describe its network, a job's describe how it uses it.
    variables = _environment_variables([text for source in reversed(sources) for text in source.environ])
    settings = LaunchSettings(**values, environ=variables, preamble=preambles[0] if preambles else ())
    _check_settings(settings)
    return settings


def _check_chosen(values: Mapping[str, Any]) -> None:
    """Check values of the command line against the rules of the job's keys; raises UserError."""
    rules = {item.name: rule_of(item.metadata) for item in fields(LaunchChoice)}
    # The rest are names, which are compared with the existing ones.
    for name in ("queue", "hosts", "time_s"):
        try:
            rules[name].read(values.get(name, AUTO if name != "queue" else ""))
        except WrongValue as error:
            option = f"--{name.replace('_', '-')} {str(values[name])[:40]}"
            raise mistake(
                option, str(error), fix=(error.fix or f"use {rules[name].expects}").removesuffix(', or "auto"')
            ) from error


def site_files(environ: Mapping[str, str]) -> list[Path]:
    """Return the existing launch.toml of the user and of the site."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "/nonexistent", ".config")
    folders = [home, *(environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)]
    return [path for folder in folders if folder and is_file(path := Path(folder) / "phalanx" / FILE)]


def read_site_file(path: Path) -> SiteFile:
    """Read a launch.toml; raises UserError with all its mistakes."""
    file = read_toml(path, noun="launch file")
    own_fields = [item for item in fields(SiteFile) if item.metadata]
    fields_by_key = {rule_of(item.metadata).key or item.name: item for item in (*fields(LaunchChoice), *own_fields)}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in file.table.items():
        if key not in fields_by_key:
            suggestion = nearest(key, fields_by_key)
            fix = f'did you mean "{suggestion}"?' if suggestion else f"the keys are {', '.join(sorted(fields_by_key))}"
            problems.append(Problem(where=file.where(key), what=f'a launch file has no key "{key}"', fix=fix))
            continue
        problem, values[fields_by_key[key].name] = _read_value(file, key, fields_by_key[key], value)
        problems += [problem] if problem is not None else []
    if problems:
        raise UserError(problems)
    preamble = values.pop("preamble", ())
    return SiteFile(launch=LaunchChoice(**values), preamble=preamble)


def _read_value(file: TomlFile, key: str, item: dataclasses.Field[Any], value: object) -> tuple[Problem | None, Any]:
    rule = rule_of(item.metadata)
    try:
        return None, rule.read(value)
    except WrongValue as error:
        fix = error.fix or f"use {rule.expects}"
        return Problem(where=file.where(key), what=f"{key} {error}", why=rule.note, fix=fix), None


def _environment_variables(texts: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE texts as a mapping; the last value of a name counts."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise mistake("launch.environ", f"{text[:60]!r} is not NAME=VALUE", fix='such as "NCCL_IB_HCA=mlx5"')
        variables[name] = value
    return variables


def _check_settings(settings: LaunchSettings) -> None:
    """Check that names used in a script are valid, and that options do not override Phalanx's; raises UserError."""
    if settings.on not in SYSTEMS:
        suggestion = nearest(settings.on, SYSTEMS)
        fix = f"did you mean {suggestion}?" if suggestion else f"use one of {', '.join(SYSTEMS)}"
        raise mistake("--on", f"{settings.on[:40]!r} is not a launch system", fix=fix)
    if settings.flavour and settings.flavour not in FLAVOURS:
        suggestion = nearest(settings.flavour, FLAVOURS)
        fix = f"did you mean {suggestion}?" if suggestion else f"use one of {', '.join(FLAVOURS)}"
        raise mistake("--flavour", f"{settings.flavour[:40]!r} is not a flavour of --on k8s", fix=fix)
    for module in settings.modules:
        if not MODULE.fullmatch(module):
            raise mistake("launch.modules", f"{module[:60]!r} is not a module name", fix='such as "cuda/12.8"')
    for option in settings.options:
        if not OPTION.fullmatch(option):
            raise mistake(
                "launch.options", f"{option[:60]!r} is not an sbatch option", fix='such as "--constraint=h100"'
            )
        name = option[2:].partition("=")[0]
        if name in OWN_OPTIONS:
            raise mistake(
                "launch.options",
                f"--{name} is set by Phalanx",
                why="the script depends on it",
                fix="leave it out; hosts, time, queue, account and qos have keys of their own",
            )
