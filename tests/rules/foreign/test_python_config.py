"""Recipes in Python: what is read of them, what stays unknown, and that nothing of them is run."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx
from phalanx.errors import UserError
from phalanx.rules.foreign.conversion import Leaf
from phalanx.rules.foreign.convert import convert_config
from phalanx.rules.foreign.python_config.recipes import read_recipe, recipes_of

HEAD = """\
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from elsewhere import change, size
BASE = 4
"""


def leaves_of_body(tmp_path: Path, body: str, *, head: str = HEAD, **variables: str) -> dict[str, Leaf]:
    path = tmp_path / "config_registry.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{head}def recipe(wide: bool = False, degree: int = 2) -> Trainer.Config:\n{lines}")
    return read_recipe(path, variables).leaves


TENSOR = "parallelism.tensor_parallel_degree"
START = "c = Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=1))\n"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=BASE * degree))", 8),
        (START + "if wide:\n    c.parallelism.tensor_parallel_degree = 8\nreturn c", 1),
        (START + "def widen(x):\n    x.parallelism.tensor_parallel_degree = 2 ** 4\nwiden(c)\nreturn c", 16),
        (START + "same = c\nsame.parallelism.tensor_parallel_degree = 2 if degree > 1 else 4\nreturn c", 2),
        (START + "for n in (2, 4):\n    c.parallelism.tensor_parallel_degree = n\nreturn c", 4),
        (START + "options = dict(tensor_parallel_degree=4)\nc.parallelism = ParallelismConfig(**options)\nreturn c", 4),
        (START + "if size() > 8:\n    raise ValueError\nc.parallelism.tensor_parallel_degree = 3\nreturn c", 3),
        (START + "if size() > 8:\n    x = 2\nelse:\n    x = 2\nc.parallelism.tensor_parallel_degree = x\nreturn c", 2),
        (START + "t = {'small': 2, 'large': 8}\nc.parallelism.tensor_parallel_degree = t['large']\nreturn c", 8),
    ],
)
def test_a_value_is_followed_to_the_configuration(tmp_path: Path, body: str, value: int) -> None:
    leaf = leaves_of_body(tmp_path, body)[TENSOR]
    assert (leaf.value, leaf.unknown) == (value, "")
    assert leaf.line > 4


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (START + "if size() > 8:\n    c.parallelism.tensor_parallel_degree = 8\nreturn c", "depends on size() > 8"),
        (START + "change(c)\nreturn c", "comes from elsewhere.change()"),
        (START + "c.parallelism.tensor_parallel_degree = size()\nreturn c", "comes from elsewhere.size()"),
        (START + "for n in size():\n    c.parallelism.tensor_parallel_degree = n\nreturn c", "loop"),
        (START + "while size():\n    c.parallelism.tensor_parallel_degree *= 2\nreturn c", "loop"),
        (START + "c.parallelism.tensor_parallel_degree = 2 if size() else 4\nreturn c", "depends on size()"),
    ],
)
def test_what_depends_on_something_unknown_is_unknown(tmp_path: Path, body: str, why: str) -> None:
    assert why in leaves_of_body(tmp_path, body)[TENSOR].unknown
    found = convert_config(tmp_path / "config_registry.py", "torchtitan")
    assert "parallel.tensor" in found.unknown  # never the default of 1
    assert any("tensor_parallel_degree" in one.what or "more arguments" in one.what for one in found.missing)


def test_what_is_set_on_an_object_that_is_not_read_holds_and_its_defaults_do_not(tmp_path: Path) -> None:
    body = "c = Trainer.Config()\nc.parallelism = size()\nc.parallelism.context_parallel_degree = 2\nreturn c"
    leaves = leaves_of_body(tmp_path, body)
    assert leaves["parallelism.context_parallel_degree"].value == 2
    found = convert_config(tmp_path / "config_registry.py", "torchtitan")
    assert "parallel.tensor" in found.unknown
    assert "parallel.context" not in found.unknown


def test_arguments_are_given_and_recipes_chosen_with_set(tmp_path: Path) -> None:
    body = "return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=degree))"
    assert leaves_of_body(tmp_path, body, degree="16")[TENSOR].value == 16
    path = tmp_path / "config_registry.py"
    path.write_text(
        f"{path.read_text()}\ndef other() -> Trainer.Config:\n    c = recipe()\n"
        "    c.parallelism.tensor_parallel_degree = 8\n    return c\n"
    )
    assert recipes_of(path) == ("recipe", "other")
    assert read_recipe(path, {"recipe": "other"}).leaves[TENSOR].value == 8
    assert "differs between the recipes" in read_recipe(path, {}).leaves[TENSOR].unknown
    with pytest.raises(UserError, match="is no recipe of"):
        read_recipe(path, {"recipe": "third"})
    report = phalanx.check_project(path)
    assert [one.target for one in report.reports] == [f"{path}::recipe", f"{path}::other"]


def test_imports_are_followed_within_the_package_only(tmp_path: Path) -> None:
    package = tmp_path / "work" / "recipes"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "common.py").write_text("DEGREE = 8\n")
    (tmp_path / "secret.py").write_text("DEGREE = 8\n")
    text = (
        "from torchtitan.trainer import Trainer\nfrom .common import DEGREE\nfrom ....secret import DEGREE as OTHER\n"
        "def recipe() -> Trainer.Config:\n    return Trainer.Config(a=DEGREE, b=OTHER)\n"
    )
    (package / "config_registry.py").write_text(text)
    leaves = read_recipe(package / "config_registry.py", {}).leaves
    assert leaves["a"].value == 8
    assert leaves["b"].value == "DEGREE"  # a name from elsewhere, not its value


@pytest.mark.parametrize(
    "body",
    [
        "return Trainer.Config(a=9 ** 9 ** 9 ** 9)",
        "return Trainer.Config(a='x' * 10 ** 9)",
        "def f():\n    return f()\nreturn Trainer.Config(a=f())",
        "x = []\nfor a in range(10 ** 9):\n    x.append(a)\nreturn Trainer.Config(a=x)",
        "return Trainer.Config(a=__import__('os').system('false'))",
        "return Trainer.Config(a=" + "(" * 90 + "1" + ")" * 90 + ")",
    ],
)
def test_hostile_programs_end_and_run_nothing(tmp_path: Path, body: str) -> None:
    leaf = leaves_of_body(tmp_path, body).get("a")
    assert leaf is None or leaf.unknown or leaf.value == 1


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text("from torchtitan import x\ndef f(:\n")
    with pytest.raises(UserError, match=r"config_registry.py:2: is not Python"):
        read_recipe(path, {})
