"""`import phalanx`: light, complete, and each command the print-out of a public function."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import phalanx
from phalanx.cli.main import FORMER_NAMES, VERBS

ROOT = Path(__file__).parents[2]
# Public functions without a verb of their own: they make or open what the others take.
WITHOUT_VERB = {"check", "cluster", "load", "runs"}
# Public names whose docstring needs no example: UserError and TrainingFailure show how the others are caught.
WITHOUT_EXAMPLE = {"PhalanxError", "RuleError", "SystemFailure", "__version__"}


def functions() -> set[str]:
    """Every public function, those of namespaces as `fabric.design`."""
    found = set()
    for name in phalanx.__all__:
        value = getattr(phalanx, name)
        if inspect.isfunction(value) or name in phalanx._PACKAGES:
            found.add(name)
        elif inspect.ismodule(value):
            found |= {f"{name}.{one}" for one in value.__all__ if inspect.isfunction(getattr(value, one))}
    return found


def calls(path: Path) -> set[str]:
    """Functions that a file of cli/, or one of its sub-commands (scale_fit.py of scale.py), calls as `phalanx.…(…)`."""
    names = set()
    for file in (path, *path.parent.glob(f"{path.stem}_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("phalanx."):
                names.add(ast.unparse(node.func).removeprefix("phalanx."))
    return names


def test_every_verb_prints_a_public_function_and_every_public_function_has_a_verb() -> None:
    printed = set()
    for verb, (module, names, _) in VERBS.items():
        wanted = set(names.split())
        path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
        assert wanted, verb
        assert wanted <= calls(path), f"{verb} does not call {wanted - calls(path)}"
        assert calls(path) <= wanted, f"{verb} also calls {calls(path) - wanted}"
        printed |= wanted
    assert functions() - printed == WITHOUT_VERB
    assert all(callable(attrgetter(name)(phalanx)) for name in printed)
    assert set(FORMER_NAMES.values()) <= set(VERBS)


def test_cli_computes_nothing() -> None:
    """No file of cli/ imports the planner, the simulator, the trainer, the agents or the dashboard."""
    for path in (ROOT / "src/phalanx/cli").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for folder in ("plan", "sim", "train", "elastic", "network", "hardware", "validate", "web", "metrics"):
            assert f"from phalanx.{folder}" not in text, path.name


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, phalanx; dir(phalanx); phalanx.PhalanxError;"
        "print(sorted({'numpy', 'torch', 'scipy', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_names_are_listed_documented_and_found() -> None:
    assert set(phalanx.__all__) <= set(dir(phalanx))
    assert sorted(phalanx.__all__) == phalanx.__all__
    assert {name for names in phalanx._HOMES.values() for name in names} | {"__version__"} == set(phalanx.__all__)
    scaling = {f"scale.{name}" for name in phalanx.scale.__all__}
    for name in functions() | scaling | set(phalanx.__all__) - WITHOUT_EXAMPLE:
        assert ">>> " in (inspect.getdoc(attrgetter(name)(phalanx)) or ""), f"{name} has no example"
    assert phalanx.__version__[0].isdigit() or phalanx.__version__ == "unknown"
    with pytest.raises(AttributeError, match=r"no attribute 'simulat'; did you mean simulate\?"):
        phalanx.simulat  # noqa: B018
    assert not hasattr(phalanx, "__wrapped__")


def test_dir_shows_public_names_only() -> None:
    """What a notebook completes after `phalanx.`, also when subpackages were imported."""
    from phalanx.scale import points  # noqa: F401

    for module in (phalanx, phalanx.data, phalanx.fabric, phalanx.scale):
        shown = {name for name in dir(module) if name not in module.__all__}
        assert shown <= {"__all__", "__doc__", "__file__", "__path__", "__version__"}, module.__name__
        assert set(module.__all__) <= set(dir(module))


def test_exceptions_are_one_tree() -> None:
    for error in (phalanx.UserError, phalanx.RuleError, phalanx.SystemFailure, phalanx.TrainingFailure):
        assert issubclass(error, phalanx.PhalanxError)
    failure = phalanx.TrainingFailure([], run="runs/x", exit_code=2)
    assert (failure.run, failure.exit_code) == ("runs/x", 2)


@pytest.mark.parametrize("first", ["import phalanx.plan.plan", "from phalanx.plan.plan import Plan", "import phalanx"])
def test_packages_that_are_functions_stay_both(first: str) -> None:
    """Whichever is imported first: the subpackage, a module of it, or the front door."""
    code = (
        f"{first}\nimport phalanx, phalanx.plan.text, phalanx.rules.run_rules, phalanx.train.prepare\n"
        "assert phalanx.plan.text.WIDTH and phalanx.rules.run_rules.CheckReport and phalanx.train.prepare.load_job\n"
        "assert len(phalanx.rules('CKP').rules) > 3\n"
        "print(phalanx.plan('examples/llama-3-8b-64xH100.toml', cluster='8xH100:1', calibration=None).layout.devices)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (run.stdout, run.stderr) == ("8\n", "")


def test_no_public_function_is_hidden_by_a_package() -> None:
    folders = {path.parent.name for path in (ROOT / "src/phalanx").glob("*/__init__.py")}
    assert folders & set(phalanx.__all__) == {*phalanx._PACKAGES, *phalanx._NAMESPACES}
    code = "import phalanx.metrics, phalanx.web, phalanx; print(callable(phalanx.metrics), callable(phalanx.web))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True True\n"


def test_no_module_hides_a_function_of_its_namespace() -> None:
    """`phalanx.scale.fit` is the function, also after every module of phalanx/scale was imported."""
    for name in phalanx._NAMESPACES:
        modules = {path.stem for path in (ROOT / "src/phalanx" / name).glob("*.py")}
        assert modules & set(getattr(phalanx, name).__all__) == set()


def test_signatures_are_those_of_the_functions() -> None:
    assert "calibration" in inspect.signature(phalanx.plan).parameters
    assert "callbacks" in inspect.signature(phalanx.train).parameters


def test_wrong_types_are_said() -> None:
    with pytest.raises(phalanx.UserError, match=r"phalanx.plan: job = '7' is of type int"):
        phalanx.plan(7)  # type: ignore[arg-type]
    with pytest.raises(phalanx.UserError, match=r"phalanx.check: target = '7' is of type int"):
        phalanx.check(7)  # type: ignore[arg-type]
    with pytest.raises(phalanx.UserError, match="overrides need a job file"):
        phalanx.plan(phalanx.load(ROOT / "examples/llama-3-8b-64xH100.toml"), overrides=["batch.micro=1"])
    job = phalanx.load(ROOT / "examples/drill.toml")
    with pytest.raises(phalanx.UserError, match=r"is of type ResolvedJob, and only job files are edited"):
        phalanx.fix(job)  # type: ignore[arg-type]
    with pytest.raises(phalanx.UserError, match=r"phalanx.diff: '7' is of type int"):
        phalanx.diff(job, 7)  # type: ignore[arg-type]
    for start in (phalanx.train, phalanx.dry_run, phalanx.drill, phalanx.drill_suite):
        with pytest.raises(phalanx.UserError, match=r"cluster = <Cluster 8xH100.* is of type Cluster"):
            start(job, cluster=phalanx.cluster("8xH100:1"))
    with pytest.raises(phalanx.UserError, match=r"phalanx.drill: job = '7' is of type int"):
        phalanx.drill(7)  # type: ignore[arg-type]
