"""Imports point only downwards, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "phalanx"

LAYERS = (
    {"io", "errors", "units"},
    {"job", "hardware", "record"},
    {"network"},
    {"plan"},
    {"sim"},
    {"rules", "elastic", "peers", "scale", "evolve"},
    {"launch", "train", "validate"},
    {"web", "metrics"},
    {"api"},
    {"cli"},
    {"__main__"},
)
BASE = LAYERS[0]  # one thought in three places: what errors say is made printable by io, what io fails with is an error
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# library -> the only folder that may import it
HOMES = {
    "torch": "train",
    "torchvision": "train",
    "safetensors": "train",
    "starlette": "web",
    "uvicorn": "web",
    "pynvml": "hardware",
    "prometheus_client": "metrics",
    "opentelemetry": "metrics",
    "tensorboard": "metrics",
    "mlflow": "metrics",
    "wandb": "metrics",
    "cryptography": "peers",
}
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions, as absolute dotted names."""
    package = ("phalanx", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            # `from phalanx import job` names a package, not an attribute
            yield from (f"{name}.{alias.name}" for alias in node.names) if name == "phalanx" else (name,)


def home(path: Path) -> str:
    """The folder or top-level module a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def violations(path: Path, found: Iterator[str]) -> list[str]:
    """What a file imports and may not."""
    here, wrong = home(path), []
    for name in found:
        top, _, rest = name.partition(".")
        if top in FORBIDDEN:
            wrong.append(f"{name}: nobody imports it")
        elif HOMES.get(top, here) != here:
            wrong.append(f"{name}: only {HOMES[top]}/ imports it")
        elif name == "phalanx" and here == "cli":
            continue  # the command line is a shell over the public functions
        elif top == "phalanx":
            there = rest.partition(".")[0]
            if there != here and LEVEL.get(there, 99) >= LEVEL[here] and not {here, there} <= BASE:
                wrong.append(f"{name}: not below {here}")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        pytest.skip("the front door may name anything; test_front_door_is_light holds it")
    assert home(path) in LEVEL, f"{home(path)} has no layer: add it to LAYERS and to the architecture page"
    assert violations(path, imports(path)) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("job/x.py", "phalanx.hardware.types"),
        ("job/x.py", "phalanx.plan"),
        ("network/x.py", "phalanx.plan"),
        ("plan/x.py", "torch.nn"),
        ("cli/x.py", "pickle"),
        ("job/x.py", "phalanx.load"),
    ],
)
def test_the_test_itself_sees_a_wrong_import(file: str, name: str) -> None:
    assert violations(SOURCE / file, iter([name]))


def test_front_door_is_light() -> None:
    """`import phalanx` at module level reaches no numpy and no torch: names are fetched on first use."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    direct = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    assert not direct & {"numpy", "scipy", "torch", "rich"}


def test_no_eval_or_exec() -> None:
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}
    ]
    assert calls == []
