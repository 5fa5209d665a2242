"""The recipes of a Python configuration, and the settings of a recipe as leaves.

A recipe is a function of the file that returns the trainer's configuration: `llama3_8b() -> Trainer.Config` of
torchtitan, `… -> ConfigContainer` of Megatron-Bridge, `… -> run.Partial` of NeMo 2, `build_config` of OLMo-core. The
annotation and an import that only its files have identify the trainer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import mistake
from phalanx.io.files import read_head
from phalanx.rules.foreign.conversion import MOST_DEPTH, MOST_LEAVES, Leaf, ReadConfig
from phalanx.rules.foreign.python_config.classes import fill_model_shape
from phalanx.rules.foreign.python_config.evaluator import PythonReader, TooMuch
from phalanx.rules.foreign.python_config.modules import PythonPackage, parse_python
from phalanx.rules.foreign.python_config.possible_values import (
    Built,
    Function,
    PythonReference,
    UnknownPython,
    is_plain,
    merge_values,
)

# trainer: the import that its files have, and the return annotation of its recipes
FAMILIES: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "torchtitan": (re.compile(r"^\s*from torchtitan\b", re.M), re.compile(r"\b\w*Trainer\.Config$")),
    "megatron-bridge": (re.compile(r"^\s*from megatron\.bridge\b", re.M), re.compile(r"^(\w+\.)*ConfigContainer$")),
    "nemo": (re.compile(r"^\s*(import nemo_run|from nemo_run)\b", re.M), re.compile(r"^(run\.)?Partial(\[.*\])?$")),
    "olmo-core": (re.compile(r"^\s*from olmo_core\b", re.M), re.compile(r"^(\w*ExperimentConfig|SFTConfig)$")),
}
OLMO_BUILDERS = ("model_config_builder", "train_module_config_builder", "trainer_config_builder")
# Sections with relevant settings: if a section is not known, its settings are not defaults.
OPEN_SECTIONS = frozenset(
    {
        *("model", "model.config", "train", "ddp", "dist", "optimizer", "scheduler", "checkpoint"),  # Megatron-Bridge
        *("trainer", "trainer.strategy", "trainer.plugins", "trainer.strategy.ddp", "data", "optim", "optim.config"),
        *("training", "parallelism", "compile", "train_module", "train_module.dp_config"),
    }
)
HOSTS = ("num_nodes",)
SEVERAL = "differs between the recipes of the file: --set recipe=NAME chooses one"
MOST_LOOKED = 1 << 20
MOST_RECIPES = 100


def family_of_python(path: Path) -> str:
    """Return the trainer whose recipes a Python file contains, or an empty text."""
    head = read_head(path, MOST_LOOKED).decode("utf-8", errors="replace")
    if not any(sign.search(head) for sign, _ in FAMILIES.values()):
        return ""
    family_and_recipes = _recipes_in(parse_python(path))
    return family_and_recipes[0] if family_and_recipes[1] else ""


def recipes_of(path: Path) -> tuple[str, ...]:
    """Return the names of a file's recipes in order; an unnamed one is an empty text."""
    return _recipes_in(parse_python(path))[1]


def _recipes_in(tree: ast.Module) -> tuple[str, tuple[str, ...]]:
    imports = "\n".join(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    names = [name for name, (sign, _) in FAMILIES.items() if sign.search(imports)]
    for family in names:
        result = FAMILIES[family][1]
        recipe_names = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_")
            and node.returns is not None
            and result.search(ast.unparse(node.returns).strip("'\""))
            and not _needs_config(node, result)
        ]
        # A function with required arguments makes no configuration by itself
        if family != "olmo-core":
            recipe_names = [recipe_name for recipe_name in recipe_names if not _required_arguments(tree, recipe_name)]
        if family == "olmo-core" and not recipe_names and _builder_call(tree) is not None:
            recipe_names = [""]
        if recipe_names:
            return family, tuple(recipe_names[:MOST_RECIPES])
    return "", ()


def _required_arguments(tree: ast.Module, name: str) -> int:
    spec = next(
        statement.args for statement in tree.body if isinstance(statement, ast.FunctionDef) and statement.name == name
    )
    num_positional = len(spec.posonlyargs) + len(spec.args) - len(spec.defaults)
    return num_positional + sum(default is None for default in spec.kw_defaults)


def _needs_config(node: ast.FunctionDef, result: re.Pattern[str]) -> bool:
    """Return whether a function changes a configuration that it is given, and so is not a recipe."""
    return any(
        parameter.annotation is not None and result.search(ast.unparse(parameter.annotation).strip("'\""))
        for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    )


def _builder_call(tree: ast.Module) -> ast.Call | None:
    """Return OLMo-core's call `partial(build_config, …)`, which names the functions that build each part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and {keyword.arg for keyword in node.keywords} >= set(OLMO_BUILDERS[1:]):
            return node
    return None


def read_recipe(path: Path, variables: Mapping[str, str]) -> ReadConfig:
    """Return the settings of a recipe; without a choice among several, the settings on which all agree."""
    package = PythonPackage(path)
    _family, names = _recipes_in(package.main.tree)
    recipe_name = variables.get("recipe", "")
    if not names:
        raise mistake(
            str(path),
            "holds no recipe that can be read",
            why="a recipe is a function that returns Trainer.Config, ConfigContainer, run.Partial or ExperimentConfig",
            fix="check the file that defines the function",
        )
    if recipe_name and recipe_name not in names:
        choices = ", ".join(names[:12]) + (" …" if len(names) > 12 else "")
        raise mistake(f"--set recipe={recipe_name[:60]}", f"is no recipe of {path.name}", fix=f"they are {choices}")
    arguments = {name: _parse_given(text) for name, text in variables.items() if name != "recipe"}
    config: object = None
    for index, name in enumerate((recipe_name,) if recipe_name else names):
        # Each with a new copy of the file's definitions: one recipe may change a table that another starts from.
        reader = PythonReader(package if index == 0 else PythonPackage(path), arguments)
        recipe_config = _evaluate_recipe(reader, path, name, arguments)
        config = recipe_config if index == 0 else merge_values(config, recipe_config, SEVERAL)
    if not isinstance(config, Built):
        reason = config.why if isinstance(config, UnknownPython) else "it returns something else"
        raise mistake(
            str(path),
            f"the recipe {recipe_name or names[0] or path.stem} cannot be followed to its configuration",
            why=reason,
            fix="--set recipe=NAME, if there are several; else check what it prints when it starts",
        )
    leaves: dict[str, Leaf] = {}
    opened: list[str] = [config.opened] if config.opened else []
    _add_leaves(config, "", leaves, opened, depth=0)
    return ReadConfig(leaves=leaves, open_why=opened[0] if opened else "")


def _parse_given(text: str) -> object:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if is_plain(value) else text


def _evaluate_recipe(reader: PythonReader, path: Path, name: str, given: Mapping[str, object]) -> object:
    try:
        if not name:
            return _olmo_experiment(reader)
        function = reader.module_name(reader.package.main, name)
        if not isinstance(function, Function):
            return UnknownPython("is not a function")
        spec = function.node.args
        names = {parameter.arg for parameter in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
        keywords = {key: value for key, value in given.items() if key in names}
        # NeMo: a placeholder for the caller's number, not a property of the run
        for key in HOSTS:
            if key in names and key not in keywords:
                keywords[key] = UnknownPython(f"is the argument {key} of the recipe: --set {key}=…")
        config = reader.call_function(function, [], keywords)
        if isinstance(config, Built):
            fill_model_shape(reader, config)
        return config
    except TooMuch:
        return UnknownPython("takes more steps than any configuration does")
    except RecursionError:
        raise mistake(str(path), "nests deeper than any configuration does") from None


def _olmo_experiment(reader: PythonReader) -> object:
    """Return the configuration of OLMo-core's internal experiments, whose parts separate functions build.

    `build_config` calls one function for each part (internal/experiment.py).
    """
    from phalanx.rules.foreign.python_config.expressions import evaluate

    call = _builder_call(reader.package.main.tree)
    assert call is not None
    values = {
        keyword.arg: evaluate(reader, keyword.value, None) for keyword in call.keywords if keyword.arg is not None
    }
    lines = {keyword.arg: keyword.value.lineno for keyword in call.keywords if keyword.arg is not None}
    common = Built(
        kind="CommonComponents",
        fields={
            "max_sequence_length": values.get("max_sequence_length", UnknownPython("is not given to build_config")),
            "global_batch_size": values.get("global_batch_size", UnknownPython("is not given to build_config")),
            "launch": UnknownPython("is decided where the run is launched"),
            "tokenizer": values.get("tokenizer", Built(kind="TokenizerConfig.dolma2")),
        },
        opened="is decided where the run is launched",
    )
    sections: dict[str, object] = {}
    for keyword, section in zip(OLMO_BUILDERS, ("model", "train_module", "trainer"), strict=True):
        builder = values.get(keyword)
        sections[section] = (
            reader.call_function(builder, [common], {})
            if isinstance(builder, Function)
            else UnknownPython("is made by a function that is not read")
        )
    loader = Built(kind="NumpyDataLoaderConfig", fields={"global_batch_size": common.fields["global_batch_size"]})
    loader.lines["global_batch_size"] = lines.get("global_batch_size", 0)
    return Built(kind="ExperimentConfig", fields={**sections, "data_loader": loader})


def _add_leaves(value: Built, prefix: str, leaves: dict[str, Leaf], opened: list[str], *, depth: int) -> None:
    if depth > MOST_DEPTH:
        return
    if value.kind:
        _add_leaf(leaves, f"{prefix}_target_", value.kind.rpartition(" ")[2], value.line)
    for index, item in enumerate(value.args[:8]):
        _add_value(item, f"{prefix}_args_.{index}", value.line, leaves, opened, depth)
    for name, item in value.fields.items():
        line = value.lines.get(name, 0)
        _add_value(item, f"{prefix}{name}", line if isinstance(line, int) else 0, leaves, opened, depth)


def _add_value(value: object, key: str, line: int, leaves: dict[str, Leaf], opened: list[str], depth: int) -> None:
    if isinstance(value, Built):
        if value.opened and not value.kind.endswith(("CommonComponents",)):
            leaves.setdefault(f"{key}.*", Leaf(key=f"{key}.*", value=None, line=line))
            opened.append(value.opened)
        _add_leaves(value, f"{key}.", leaves, opened, depth=depth + 1)
    elif isinstance(value, UnknownPython):
        _add_leaf(leaves, key, "not known", line, unknown=value.why)
        if key in OPEN_SECTIONS:
            opened.append(value.why)
    elif isinstance(value, PythonReference):
        _add_leaf(leaves, key, value.name.rpartition(".")[2], line)
    elif isinstance(value, dict):
        for name, item in value.items():
            _add_value(item, f"{key}.{str(name)[:100]}", line, leaves, opened, depth + 1)
    elif isinstance(value, list | tuple):
        if all(is_plain(item) for item in value):
            _add_leaf(leaves, key, list(value), line)
        else:
            for index, item in enumerate(value):
                _add_value(item, f"{key}.{index}", line, leaves, opened, depth + 1)
    elif is_plain(value):
        _add_leaf(leaves, key, value, line)


def _add_leaf(leaves: dict[str, Leaf], key: str, value: object, line: int, *, unknown: str = "") -> None:
    if len(leaves) >= MOST_LEAVES:
        raise mistake(
            key[:60], f"is one of more than {MOST_LEAVES:,} settings", why="no training configuration has them"
        )
    leaves[key] = Leaf(key=key, value=value, line=line, unknown=unknown)
