"""What a trainer's own code makes of its own recipes: the truth that `phalanx` is held against, for recipes in Python.

    python benchmarks/foreign_recipes.py UPSTREAM megatron-bridge TRUTH.json --also MEGATRON_LM
    python benchmarks/foreign_recipes.py UPSTREAM nemo-2|torchtitan|olmo-core TRUTH.json [--also MEGATRON_LM]

UPSTREAM is a checkout of the trainer. **It runs that code**: in a throwaway environment, without a network, never in a
test. Modules that are not installed become stand-ins, for importers below UPSTREAM or --also only; a model's shape
from Hugging Face is one too. TRUTH.json has one row per recipe, and why others could not be run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import traceback
import types
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

Row = dict[str, Any]


class StandIn:
    """Whatever a missing package would have given: takes any arguments, has any attribute, is false."""

    def __init__(self, *_args: object, **given: object) -> None:
        self.__dict__.update(given)

    def __call__(self, *args: Any, **given: object) -> Any:
        decorated = len(args) == 1 and not given and isinstance(args[0], type | types.FunctionType)
        return args[0] if decorated else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __getitem__(self, _key: object) -> Any:
        return StandIn()

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __or__(self, _other: object) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return ()


class StandInMeta(ABCMeta):
    """A class of a missing package, from which others may be made."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def register(cls, *_args: object, **_given: object) -> Any:
        """As a decorator with a name, which some packages have."""
        return lambda one: one


class StandInModule(types.ModuleType):
    """A module that is not installed."""

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]
    __version__ = "9.9.9"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[:1].isupper():
            return StandIn()
        body = {"__init__": StandIn.__init__, "__getattr__": StandIn.__getattr__, "__module__": self.__name__}
        return StandInMeta(name, (), {**body, "__class_getitem__": classmethod(lambda cls, _item: cls)})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last resort of imports that code below `folders` makes; `real` are packages that must be there."""

    def __init__(self, folders: Sequence[str], real: Sequence[str], *, engine: bool) -> None:
        self.folders, self.real, self.engine, self.made = tuple(folders), tuple(real), engine, set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """A spec for what nobody else found."""
        if name == "megatron" or name in self.real or name.startswith(tuple(f"{one}." for one in self.real)):
            return None
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        top, where = name.partition(".")[0], frame.f_code.co_filename
        if top not in self.made and not where.startswith(self.folders) and "/nemo_run/" not in where:
            return None
        if top == "transformer_engine" and not (self.engine and where.startswith(self.folders[0])):
            return None  # Megatron Core and NeMo run without it, Megatron-Bridge imports it unasked
        self.made.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty one."""
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def value_at(one: Any, path: str) -> Any:
    """An attribute of attributes; None where there is none."""
    for name in path.split("."):
        try:
            one = getattr(one, name)
        except Exception:  # fiddle has several kinds
            return None
        if one is None or isinstance(one, StandIn):
            return None
    return one


# Per trainer: where its recipes are, and the values of a row by their place in what a recipe returns.
MEGATRON_WORDS = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "VP": "virtual_pipeline_model_parallel_size",
}
FAMILIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "megatron-bridge": (
        "src",
        "megatron/bridge/*recipes/**/*.py",
        {
            **{key: f"model.{word}" for key, word in MEGATRON_WORDS.items()},
            "recompute": "model.recompute_granularity",
            "ddp": "ddp.use_distributed_optimizer",
            "optimizer": "optimizer.use_distributed_optimizer",
            "fsdp": "ddp.use_megatron_fsdp",
            "strategy": "ddp.data_parallel_sharding_strategy",
            "precision": "mixed_precision",
            "micro": "train.micro_batch_size",
            "global": "train.global_batch_size",
        },
    ),
    "nemo-2": (
        ".",
        "nemo/collections/llm/recipes/*.py",
        {
            **{key: f"trainer.strategy.{word}" for key, word in MEGATRON_WORDS.items()},
            "recompute": "model.config.recompute_granularity",
            "ddp": "trainer.strategy.ddp.use_distributed_optimizer",
            "optimizer": "optim.config.use_distributed_optimizer",
            "precision": "trainer.plugins.precision",
            "micro": "data.micro_batch_size",
            "global": "data.global_batch_size",
        },
    ),
    "torchtitan": (
        ".",
        "torchtitan/**/config_registry.py torchtitan/**/config_registry/*.py",
        {
            "TP": "parallelism.tensor_parallel_degree",
            "PP": "parallelism.pipeline_parallel_degree",
            "CP": "parallelism.context_parallel_degree",
            "EP": "parallelism.expert_parallel_degree",
            "recompute": "activation_checkpoint",
            "precision": "training.mixed_precision_param",
            "micro tokens": "training.num_tokens_per_microbatch_per_dp_rank",
            "sequence": "training.max_context_length",
        },
    ),
    "olmo-core": (
        "src",
        "scripts/**/*.py",
        {
            "TP": "train_module.tp_config.degree",
            "PP": "train_module.pp_config.degree",
            "CP": "train_module.cp_config.degree",
            "data parallel": "train_module.dp_config.name",
            "recompute": "train_module.ac_config.mode",
            "precision": "train_module.dp_config.param_dtype",
            "fp8": "train_module.float8_config.enabled",
            "micro tokens": "train_module.rank_microbatch_size",
            "global tokens": "data_loader.global_batch_size",
        },
    ),
}


def prepare_bridge() -> None:
    """A model from Hugging Face is an empty provider: its shape is not compared."""
    from megatron.bridge.models.conversion import auto_bridge  # type: ignore[import-not-found]
    from megatron.bridge.models.gpt_provider import GPTModelProvider  # type: ignore[import-not-found]

    def provider(*_args: object, **_given: object) -> Any:
        return GPTModelProvider(num_layers=32, hidden_size=4096, num_attention_heads=32)

    fake = StandIn(to_megatron_provider=provider, get_model_config=provider)
    for name in ("from_hf_pretrained", "from_hf_config"):
        setattr(auto_bridge.AutoBridge, name, classmethod(lambda *_args, **_given: fake))


def recipes_in(module: types.ModuleType, family: str) -> dict[str, Callable[[], Any]]:
    """Functions of a module that take no arguments; of OLMo-core what its `main` is given."""
    found = {}
    for name, one in vars(module).items():
        plain = inspect.unwrap(one) if callable(one) else None
        if name.startswith("_") or not inspect.isfunction(plain) or plain.__module__ != module.__name__:
            continue
        spec = inspect.signature(plain).parameters.values()
        if family != "olmo-core" and all(p.default is not p.empty or p.kind in (2, 4) for p in spec):
            found[name] = one
    return found


def olmo_recipe(module: types.ModuleType, path: Path) -> dict[str, Callable[[], Any]]:
    """The builder that a script hands to OLMo-core's `main`, with what a dry run gives it."""
    from olmo_core import script_utils  # type: ignore[import-not-found]
    from olmo_core.internal import experiment  # type: ignore[import-not-found]

    given: dict[str, Any] = {}

    def note(builder: Any = None, *_args: object, config_builder: Any = None, **_given: object) -> None:
        given["builder"] = config_builder or builder

    experiment.build_launch_config = lambda *_args, **_given: StandIn(clusters=["ai2/jupiter"], num_nodes=1)
    experiment.main = script_utils.main = note
    script_utils.ExperimentConfig.merge = experiment.ExperimentConfig.merge = lambda self, *_args, **_given: self
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
    builder = given.get("builder")
    if builder is None:
        return {}
    if len(inspect.signature(builder).parameters) == 2:
        options = script_utils.get_cli_parser().parse_args(["--name", "run", "--save-folder", "out"])
        return {"build_config": lambda: builder(options, [])}
    context = experiment.CliContext(
        script=str(path), cmd=experiment.SubCmd.dry_run, run_name="run", cluster="ai2/jupiter", overrides=[]
    )
    return {"build_config": lambda: builder(context)}


def run_recipes(upstream: Path, family: str) -> tuple[dict[str, Row], dict[str, str]]:
    """A row per recipe, and the last words of those that could not be run."""
    below, pattern, places = FAMILIES[family]
    rows: dict[str, Row] = {}
    failed: dict[str, str] = {}
    for path in sorted({one for part in pattern.split() for one in (upstream / below).glob(part)}):
        name = ".".join(path.relative_to(upstream / below).with_suffix("").parts)
        try:
            if family == "olmo-core":
                sys.argv = [str(path), "dry_run", "run", "ai2/jupiter"]
                recipes = olmo_recipe(types.ModuleType(name), path)
            else:
                recipes = recipes_in(importlib.import_module(name), family)
        except (Exception, SystemExit):
            failed[name] = traceback.format_exc()[-300:]
            continue
        for recipe, make in recipes.items():
            try:
                made = make()
            except (Exception, SystemExit):
                failed[f"{name}::{recipe}"] = traceback.format_exc()[-300:]
                continue
            row = {key: value_at(made, place) for key, place in places.items()}
            if any(value is not None for value in row.values()):
                rows[f"{path.relative_to(upstream)}::{recipe}"] = {
                    key: value if isinstance(value, int | float | str | None) else str(value)[:80]
                    for key, value in row.items()
                }
    return rows, failed


def main() -> None:
    """Read the call, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("upstream", type=Path)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--also", type=Path, action="append", default=[])
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.pop(0)  # the folder of this program has modules of common names
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    folders = [given.upstream.resolve(), *(one.resolve() for one in given.also)]
    sys.path[:0] = [str(folders[0] / FAMILIES[given.family][0]), *(str(one) for one in folders[1:])]
    real = ("torch", "numpy", "megatron.bridge", "nemo", "olmo_core", "torchtitan")
    engine = given.family == "megatron-bridge"
    sys.meta_path.append(StandInFinder([str(one) for one in folders], real, engine=engine))
    if given.family == "megatron-bridge":
        prepare_bridge()
    elif given.family == "torchtitan":
        utils: Any = importlib.import_module("torchtitan.tools.utils")
        utils.has_cuda_capability = lambda *_args: True  # recipes in fp8 ask for it
    rows, failed = run_recipes(folders[0], given.family)
    given.out.write_text(json.dumps({"rows": rows, "failed": failed}, indent=1))
    print(f"{len(rows)} recipes; {len(failed)} could not be run")


if __name__ == "__main__":
    main()
