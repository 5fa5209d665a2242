"""Phalanx: one job file from a laptop to a hundred thousand GPUs.

>>> import phalanx
>>> job = phalanx.load("examples/llama-3-8b-64xH100.toml")
>>> plan = phalanx.plan(job, "8xH100:4")
>>> plan.layout.devices
32
>>> phalanx.check(plan).errors
0

Every command of `phalanx` is a function here: it returns what the command prints, `print(result)` prints that page,
and a notebook shows it as HTML. docs/python.md is the guide. Large dependencies are imported on first use.
"""

from __future__ import annotations

import sys
import types

# Read by type checkers; importing typing would lengthen the start-up time in which Ctrl-C is not handled yet.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.api import data as data
    from phalanx.api import evolve as evolve
    from phalanx.api import fabric as fabric
    from phalanx.api import kernels as kernels
    from phalanx.api import peers as peers
    from phalanx.api import scale as scale
    from phalanx.api.checking import check, explain, fix
    from phalanx.api.checking import rules as rules
    from phalanx.api.checkpoints import checkpoints, export
    from phalanx.api.clusters import accelerators, cluster, describe_cluster, probe
    from phalanx.api.drill_records import read_drill_record
    from phalanx.api.drills import drill, drill_suite
    from phalanx.api.job_schemas import job_schema
    from phalanx.api.jobs import import_job, load, show
    from phalanx.api.launching import cancel, logs, queue, requeue, why
    from phalanx.api.launching import launch as launch
    from phalanx.api.new_job import init
    from phalanx.api.operating import cluster_health, cluster_init
    from phalanx.api.outside_drills import drill_outside, list_outside_drills
    from phalanx.api.planning import backtest, calibrate, compare_plans
    from phalanx.api.planning import plan as plan
    from phalanx.api.project_checks import check_project
    from phalanx.api.proofs import trace, verify
    from phalanx.api.queue_simulating import simulate_queue
    from phalanx.api.runs import diff, report, run, runs, watch
    from phalanx.api.serving import grafana
    from phalanx.api.serving import metrics as metrics
    from phalanx.api.serving import web as web
    from phalanx.api.simulating import simulate
    from phalanx.api.training import dry_run, join_run
    from phalanx.api.training import train as train
    from phalanx.errors import PhalanxError, RuleError, SystemFailure, TrainingFailure, UserError
    from phalanx.hardware.types import Cluster
    from phalanx.job.load import ResolvedJob
    from phalanx.job.schema import Job
    from phalanx.plan.plan import Plan
    from phalanx.record.run import Run
    from phalanx.rules.run_rules import CheckReport, Finding
    from phalanx.train.callbacks import Callback

    __version__: str

# The module of each public name; imported on first use, since `phalanx --help` must not import numpy.
_HOMES = {
    "phalanx.api": ("data", "evolve", "fabric", "kernels", "peers", "scale"),
    "phalanx.api.checking": ("check", "explain", "fix", "rules"),
    "phalanx.api.checkpoints": ("checkpoints", "export"),
    "phalanx.api.clusters": ("accelerators", "cluster", "describe_cluster", "probe"),
    "phalanx.api.drill_records": ("read_drill_record",),
    "phalanx.api.drills": ("drill", "drill_suite"),
    "phalanx.api.job_schemas": ("job_schema",),
    "phalanx.api.jobs": ("import_job", "load", "show"),
    "phalanx.api.launching": ("cancel", "launch", "logs", "queue", "requeue", "why"),
    "phalanx.api.new_job": ("init",),
    "phalanx.api.operating": ("cluster_health", "cluster_init"),
    "phalanx.api.outside_drills": ("drill_outside", "list_outside_drills"),
    "phalanx.api.planning": ("backtest", "calibrate", "compare_plans", "plan"),
    "phalanx.api.project_checks": ("check_project",),
    "phalanx.api.proofs": ("trace", "verify"),
    "phalanx.api.queue_simulating": ("simulate_queue",),
    "phalanx.api.runs": ("diff", "report", "run", "runs", "watch"),
    "phalanx.api.serving": ("grafana", "metrics", "web"),
    "phalanx.api.simulating": ("simulate",),
    "phalanx.api.training": ("dry_run", "join_run", "train"),
    "phalanx.errors": ("PhalanxError", "RuleError", "SystemFailure", "TrainingFailure", "UserError"),
    "phalanx.hardware.types": ("Cluster",),
    "phalanx.job.load": ("ResolvedJob",),
    "phalanx.job.schema": ("Job",),
    "phalanx.plan.plan": ("Plan",),
    "phalanx.record.run": ("Run",),
    "phalanx.rules.run_rules": ("CheckReport", "Finding"),
    "phalanx.train.callbacks": ("Callback",),
}
# Public functions with the same name as a subpackage.
_PACKAGES = ("launch", "metrics", "plan", "rules", "train", "web")
# Namespaces of public functions, in api/, with the same name as a subpackage.
_NAMESPACES = ("evolve", "peers", "scale")
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Callback",
    "CheckReport",
    "Cluster",
    "Finding",
    "Job",
    "PhalanxError",
    "Plan",
    "ResolvedJob",
    "RuleError",
    "Run",
    "SystemFailure",
    "TrainingFailure",
    "UserError",
    "__version__",
    "accelerators",
    "backtest",
    "calibrate",
    "cancel",
    "check",
    "check_project",
    "checkpoints",
    "cluster",
    "cluster_health",
    "cluster_init",
    "compare_plans",
    "data",
    "describe_cluster",
    "diff",
    "drill",
    "drill_outside",
    "drill_suite",
    "dry_run",
    "evolve",
    "explain",
    "export",
    "fabric",
    "fix",
    "grafana",
    "import_job",
    "init",
    "job_schema",
    "join_run",
    "kernels",
    "launch",
    "list_outside_drills",
    "load",
    "logs",
    "metrics",
    "peers",
    "plan",
    "probe",
    "queue",
    "read_drill_record",
    "report",
    "requeue",
    "rules",
    "run",
    "runs",
    "scale",
    "show",
    "simulate",
    "simulate_queue",
    "trace",
    "train",
    "verify",
    "watch",
    "web",
    "why",
]


class _CallablePackage(types.ModuleType):
    # A package that is a public function too: `phalanx.plan(job)` and `from phalanx.plan.plan import Plan`.

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        doc: str | None = _public(self.__name__.rpartition(".")[2]).__doc__
        return doc

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _public(self.__name__.rpartition(".")[2])(*arguments, **options)

    @property
    def __wrapped__(self) -> Any:  # read by inspect.signature and help()
        return _public(self.__name__.rpartition(".")[2])


class _NamespacePackage(types.ModuleType):
    # A package that is a namespace of public functions too: `phalanx.scale.fit(...)` and `phalanx.scale.points`.

    def __getattr__(self, name: str) -> Any:
        if name == "__all__" or name in _namespace(self)["__all__"]:
            return _namespace(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted([*_namespace(self)["__all__"], "__all__", "__doc__", "__file__", "__path__"])


def _namespace(package: types.ModuleType) -> dict[str, Any]:
    namespace: dict[str, Any] = vars(_public(package.__name__.rpartition(".")[2]))
    return namespace


class _FrontDoor(types.ModuleType):
    """This package's module type.

    Importing a subpackage binds its name here; if a public function has that name, the module becomes callable.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, types.ModuleType) and name in _PACKAGES:
            value.__class__ = _CallablePackage
        if isinstance(value, types.ModuleType) and value.__name__ == f"phalanx.{name}" and name in _NAMESPACES:
            value.__class__ = _NamespacePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor


def _public(name: str) -> Any:
    from importlib import import_module

    if _HOME[name] == "phalanx.api":
        return import_module(f"phalanx.api.{name}")
    return getattr(import_module(_HOME[name]), name)


def __getattr__(name: str) -> Any:
    if name in (*_PACKAGES, *_NAMESPACES):
        from importlib import import_module

        return import_module(f"phalanx.{name}")
    if name == "__version__":
        from phalanx.api.results import own_version

        return own_version()
    if name in _HOME:
        public_object = _public(name)
        globals()[name] = public_object
        return public_object
    if name.startswith("__"):
        raise AttributeError(name)
    from phalanx.errors import nearest

    close = nearest(name, __all__)
    hint = f"did you mean {close}?" if close else f"the public names are {', '.join(__all__)}"
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}; {hint}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__all__", "__doc__", "__file__", "__path__", "__version__"})
