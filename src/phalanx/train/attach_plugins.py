"""Makes the references of plug-ins that a job carries from Python objects: a place in a file, or source.

A rank is a separate process and unpickles nothing, so every object must be loadable by name, or from the source of a
notebook or script that the job then carries (`plugins.py` loads both).
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib.machinery
import inspect
import json
import linecache
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from phalanx.errors import UserError, mistake
from phalanx.io.code_names import missing_code, missing_entry_point
from phalanx.io.path_probes import is_file, resolve_path
from phalanx.job.plugin_reference import MODEL_GROUP, PLUGIN_GROUPS, SOURCE_MODULE, PluginReference, list_references
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.train.callbacks import Callback
from phalanx.train.plugins import ATTRIBUTES, STATE

PlanOrJob = TypeVar("PlanOrJob", Plan, Job)
_WANTED = {  # objects allowed for each kind, besides a reference
    "callbacks": "an object or subclass of phalanx.Callback, or a function that makes one",
    "loss": "a function of logits and targets",
    "optimizer": "a class or function that makes an optimizer",
    "data": "a class, a function that makes the data, or an object of a class of your own",
    "model": "a class or function that makes the model",
    "metrics": "a function of logits and targets",
}


def attach_plugins(
    plan_or_job: PlanOrJob,
    *,
    callbacks: Sequence[Any] = (),
    loss: Any = None,
    optimizer: Any = None,
    data: Any = None,
    model: Any = None,
    metrics: Sequence[Any] = (),
) -> PlanOrJob:
    """Return the plan or job with these objects as its plug-ins.

    Each may be a reference (text), a class or a function. Callbacks and data may also be instances whose attributes
    are JSON values, or that have a `state_dict()`; a `functools.partial` carries keyword arguments. Raises UserError
    for an object that another process could not load.
    """
    job: Job = plan_or_job.job if isinstance(plan_or_job, Plan) else plan_or_job
    _check_lists(callbacks=callbacks, metrics=metrics)
    writer: _SourceWriter = _SourceWriter(job.plugins.source)
    plugins = dataclasses.replace(
        job.plugins,
        callbacks=(*job.plugins.callbacks, *(writer.reference(plugin, "callbacks") for plugin in callbacks)),
        metrics=(*job.plugins.metrics, *(writer.reference(plugin, "metrics") for plugin in metrics)),
        loss=job.plugins.loss if loss is None else writer.reference(loss, "loss"),
        optimizer=job.plugins.optimizer if optimizer is None else writer.reference(optimizer, "optimizer"),
        data=job.plugins.data if data is None else writer.reference(data, "data"),
    )
    shape = job.model
    if model is not None:
        reference = writer.reference(model, "model")
        head, brace, rest = reference.partition("{")
        shape = dataclasses.replace(shape, module=head.strip(), arguments=brace + rest or shape.arguments)
    plugins = dataclasses.replace(plugins, source=tuple(writer.lines()))
    job = dataclasses.replace(job, plugins=plugins, model=shape)
    return dataclasses.replace(plan_or_job, job=job) if isinstance(plan_or_job, Plan) else job


def _check_lists(**given: Any) -> None:
    """Raise UserError for a single callback or metric where a list is expected, rather than iterate over it."""
    for key, value in given.items():
        if isinstance(value, str) or not isinstance(value, Iterable):
            shown = repr(value) if isinstance(value, str) else type(value).__name__
            raise mistake(key, f"{shown[:60]} is no list", fix=f"give a list, also of one: {key}=[…]")


def without_plugins(job: Job, keys: Iterable[str]) -> Job:
    """Return the job without its plug-ins of these keys, which are parameters of `attach_plugins`.

    Source that only these plug-ins used is removed too.
    """
    list_keys, dropped = ("callbacks", "metrics"), set(keys)
    if not dropped:
        return job
    model = dataclasses.replace(job.model, module="") if "model" in dropped else job.model
    empty: dict[str, Any] = {key: () if key in list_keys else "" for key in dropped - {"model"}}
    plugins = dataclasses.replace(job.plugins, **empty)
    references = [model.module, *(text for _, text in list_references(plugins))]
    if not any(text.startswith(f"{SOURCE_MODULE}:") for text in references):
        plugins = dataclasses.replace(plugins, source=())
    return dataclasses.replace(job, plugins=plugins, model=model)


class _SourceWriter:
    """Makes references, and collects the source of definitions that cannot be imported from a file."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._imports: list[str] = []
        self._text = list(lines)
        self._seen: set[str] = set()

    def lines(self) -> list[str]:
        """Return the lines of the module that the job carries."""
        return [*self._imports, *self._text]

    def reference(self, thing: Any, kind: str) -> str:
        """Return the reference of an object; raise UserError if it cannot be a plug-in of that kind."""
        if isinstance(thing, str):
            return _found_reference(thing, kind)
        if isinstance(thing, functools.partial):
            if thing.args:
                raise self._plugin_refused(
                    thing.func, kind, "a partial with positional arguments", "use keyword arguments"
                )
            return self._with_arguments(
                self.reference(thing.func, kind), self._checked_json(thing.keywords, thing.func, kind)
            )
        self._check_kind(thing, kind)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            return self._place_reference(thing, kind)
        return self._instance_reference(thing, kind)

    def _check_kind(self, thing: Any, kind: str) -> None:
        """Raise UserError here for an object of a wrong type, which every rank would refuse after its start."""
        if inspect.isfunction(thing):
            return
        is_class = inspect.isclass(thing)
        cls = thing if is_class else type(thing)
        if kind == "callbacks":
            fits = issubclass(cls, Callback)
        elif is_class:
            fits = True
        else:
            # Objects of the standard library, such as open files, cannot be loaded in another process.
            fits = cls.__module__.partition(".")[0] not in sys.stdlib_module_names and (
                kind == "data" or (kind in ("loss", "metrics") and callable(thing))
            )
        if not fits:
            shown = f"the class {cls.__name__}" if is_class else f"of type {cls.__name__}"
            raise self._plugin_refused(str(thing)[:60], kind, shown, f"give {_WANTED[kind]}")

    def _instance_reference(self, thing: Any, kind: str) -> str:
        """Return the reference of an instance: its class with its attributes or its state_dict()."""
        cls = type(thing)
        place = self._place_reference(cls, kind)
        attributes = getattr(thing, "__dict__", None)
        if attributes is not None and _is_json(attributes):
            return self._with_arguments(place, {ATTRIBUTES: dict(attributes)} if attributes else {})
        wrong = [name for name, value in (attributes or {}).items() if not _is_json(value)]
        required = [
            name
            for name, parameter in inspect.signature(cls).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if required or not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            raise self._plugin_refused(
                cls,
                kind,
                f"an instance whose {', '.join(wrong[:4]) or 'attributes'} cannot be written as JSON",
                "give a function that makes it, or make these attributes when training starts",
            )
        return self._with_arguments(place, {STATE: self._checked_json(thing.state_dict(), cls, kind)})

    def _place_reference(self, thing: Any, kind: str) -> str:
        """Return the reference of a class or function: its module, its file, or its source in the job."""
        module, name = thing.__module__, thing.__qualname__
        if "<locals>" in name:
            raise self._plugin_refused(
                thing, kind, "defined inside a function", "define it at the top level of its file"
            )
        if "<lambda>" in name:
            raise self._plugin_refused(thing, kind, "a lambda", "write it as a function with a name")
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        if module != "__main__" and _is_installed(module):
            return f"{module}:{name}"
        if module != "__main__" and file.endswith(".py") and is_file(file):
            return f"{resolve_path(file)}:{name}"
        self._add_source(thing, kind)
        return f"{SOURCE_MODULE}:{name}"

    def _add_source(self, thing: Any, kind: str) -> None:
        """Add the source of a class or function of a notebook or script, and of the names that it uses."""
        if thing.__qualname__ in self._seen:
            return
        self._seen.add(thing.__qualname__)
        try:
            text = _source_of(thing)
        except (OSError, TypeError) as error:
            raise self._plugin_refused(
                thing, kind, f"without source: {error}", "put it in a file, and import it"
            ) from error
        tree = ast.parse(text)
        scope = thing.__globals__ if inspect.isfunction(thing) else vars(sys.modules[thing.__module__])
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {thing.__name__}
        for name in sorted(names & scope.keys()):
            self._add_global(name, scope[name], thing, kind)
        self._text += ["", "", *text.expandtabs(4).rstrip().splitlines()]

    def _add_global(self, name: str, value: Any, user: Any, kind: str) -> None:
        """Add a name that the source uses: an import, another definition, or a constant."""
        if name in self._seen or hasattr(builtins, name):
            return
        line = ""
        if isinstance(value, ModuleType):
            line = f"import {value.__name__} as {name}"
        elif (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__ not in ("__main__", None):
            top, _, rest = value.__qualname__.partition(".")
            if rest:
                raise self._plugin_refused(
                    user, kind, f"uses {name}, a {value.__qualname__}", "import its class instead"
                )
            line = f"from {value.__module__} import {top} as {name}"
        elif inspect.isclass(value) or inspect.isfunction(value):
            self._add_source(value, kind)
            return
        elif _is_json(value):
            line = f"{name} = {value!r}"
        else:
            raise self._plugin_refused(
                user,
                kind,
                f"uses the variable {name}, a {type(value).__name__}",
                "make it inside, or give it as an attribute that JSON can hold",
            )
        self._seen.add(name)
        self._imports.append(line)

    def _with_arguments(self, reference: str, arguments: Mapping[str, Any]) -> str:
        return f"{reference} {json.dumps(dict(arguments))}" if arguments else reference

    def _checked_json(self, value: Mapping[str, Any], thing: Any, kind: str) -> dict[str, Any]:
        """Return the arguments; raise UserError if they cannot be written as JSON."""
        if not _is_json(value):
            raise self._plugin_refused(thing, kind, "with arguments that cannot be written as JSON", "use plain values")
        return dict(value)

    @staticmethod
    def _plugin_refused(thing: Any, kind: str, what: str, fix: str) -> UserError:
        return mistake(
            f"{kind}: {getattr(thing, '__qualname__', thing)}",
            f"is {what}" if not what.startswith("uses") else what,
            why="ranks are processes of their own, and load it by name or from its source",
            fix=fix,
        )


def _found_reference(text: str, kind: str) -> str:
    """Check that a reference can be found, and return it with its file as an absolute path.

    Ranks start in another folder than the caller.
    """
    key = "model.module" if kind == "model" else f"plugins.{kind}"
    reference = PluginReference.parse(text, key=key)
    if reference.place == SOURCE_MODULE:
        return text
    if reference.place:
        problem = missing_code(f"{reference.place}:{reference.name}", resolve_path(""))
    else:
        problem = missing_entry_point(reference.name, {**PLUGIN_GROUPS, "model": MODEL_GROUP}[kind])
    if problem is not None:
        what, fix = problem
        raise mistake(key, what, fix=fix.replace("relative to the job file", "relative to this folder"))
    names_file = reference.place.endswith(".py")
    return f"{resolve_path(reference.place)}{text.strip()[len(reference.place) :]}" if names_file else text


def _is_installed(module: str) -> bool:
    """Return True if every process here can import the module, also from another folder or script."""
    top, script = module.partition(".")[0], getattr(sys.modules.get("__main__"), "__file__", None)
    local_folders = {resolve_path(""), *([resolve_path(script).parent] if script else [])}
    paths = [entry for entry in sys.path if entry and resolve_path(entry) not in local_folders]
    if top in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(top, paths) is not None:
        return True
    editable = [entry for entry in sys.meta_path if getattr(entry, "__module__", "").startswith("__editable__")]
    return any(entry.find_spec(top, None) is not None for entry in editable)


def _source_of(thing: Any) -> str:
    """Return the source of a class or function, also of a class in a notebook, which `inspect` does not find."""
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        methods = [item for item in vars(thing).values() if inspect.isfunction(item)] if inspect.isclass(thing) else []
        for method in methods:  # their code objects name the notebook cell
            text = "".join(linecache.getlines(method.__code__.co_filename))
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
                    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
        raise


def _is_json(value: Any) -> bool:
    """Return True if JSON gives the value back unchanged."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
