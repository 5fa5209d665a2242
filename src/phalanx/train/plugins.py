"""Loads the user's own code that a job names: callbacks, loss, optimizer, data and metrics.

A job names each as a reference: "file.py:name", "package.module:name", or the name of an entry point, optionally
followed by keyword arguments as a JSON object. Every rank is a separate process and loads them itself; nothing is
pickled. `attach_plugins.py` makes references of Python objects: the place of a class or function that is defined in a
file, or the source of one that is defined in a notebook or script, which the job then carries.

Files and modules that a job names are run only with consent (`--allow-code`); an entry point was installed on
purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from phalanx.errors import UserError, mistake, nearest
from phalanx.io.code_names import missing_entry_point
from phalanx.io.path_probes import is_file, resolve_path
from phalanx.io.user_code import find_neighbours
from phalanx.job.plugin_reference import PLUGIN_GROUPS, SOURCE_MODULE, PluginReference, list_references, runs_named_code
from phalanx.job.schema import Job, PluginReferences
from phalanx.plan.layout import Layout
from phalanx.train.callbacks import Callback
from phalanx.units import plural

if TYPE_CHECKING:
    from torch import Tensor

# Keys among a reference's arguments: an object's attributes, set instead of calling its constructor, and its
# state_dict().
ATTRIBUTES = "__attributes__"
STATE = "__state__"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPlugins:
    """The plug-ins that a rank has loaded for its training loop; the engine loads loss and optimizer itself."""

    callbacks: tuple[Callback, ...] = ()
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    data: Any = None


def needs_consent(job: Job) -> list[str]:
    """Return the job's keys that name code which runs only with consent: all but entry points."""
    keys = ["model.module"] if runs_named_code(job.model.module) else []
    keys += [f"plugins.{key}" for key, text in list_references(job.plugins) if runs_named_code(text)]
    if job.plugins.source:
        keys.append("plugins.source")
    return list(dict.fromkeys(keys))


def absolute_references(plugins: PluginReferences, base: Path) -> PluginReferences:
    """Return the references with absolute file paths; relative ones start at the job's folder."""

    def absolute(text: str) -> str:
        head, brace, rest = text.partition("{")
        place, colon, name = head.rpartition(":")
        return f"{resolve_path(base / place)}{colon}{name}{brace}{rest}" if place.endswith(".py") else text

    return dataclasses.replace(
        plugins,
        callbacks=tuple(map(absolute, plugins.callbacks)),
        metrics=tuple(map(absolute, plugins.metrics)),
        loss=absolute(plugins.loss),
        optimizer=absolute(plugins.optimizer),
        data=absolute(plugins.data),
    )


def load_plugins(job: Job, *, allow_code: bool) -> LoadedPlugins:
    """Create a job's callbacks, metrics and data for this rank; raise UserError for what cannot be loaded."""
    plugins = job.plugins
    install_source(job, allow_code=allow_code)
    callbacks = []
    for text in plugins.callbacks:
        callback = make_plugin(text, kind="callbacks", allow_code=allow_code)
        if not isinstance(callback, Callback):
            raise mistake(
                "plugins.callbacks",
                f"{text!r} made a {type(callback).__name__}",
                fix="subclass phalanx.Callback",
            )
        callbacks.append(callback)
    metrics = {
        PluginReference.parse(text, key="plugins.metrics").name: load_function(
            text, kind="metrics", allow_code=allow_code
        )
        for text in plugins.metrics
    }
    job_values = {"sequence": job.data.sequence, "seed": job.data.seed, "vocab": job.model.vocab}
    data = make_plugin(plugins.data, kind="data", allow_code=allow_code, known=job_values) if plugins.data else None
    return LoadedPlugins(callbacks=tuple(callbacks), metrics=metrics, data=data)


def make_plugin(text: str, *, kind: str, allow_code: bool, known: Mapping[str, Any] | None = None) -> Any:
    """Return the object of a reference: the result of calling the class or function that it names.

    It is called with the reference's arguments, and with those values of `known` that it has parameters for.
    """
    key = f"plugins.{kind}"
    reference = PluginReference.parse(text, key=key)
    factory: Any = _find_plugin(reference, text, kind=kind, allow_code=allow_code)
    if not callable(factory) or (not inspect.isclass(factory) and not inspect.isroutine(factory)):
        return factory
    arguments = dict(reference.arguments)
    attributes, state = arguments.pop(ATTRIBUTES, None), arguments.pop(STATE, None)
    try:
        if attributes is not None:
            plugin: Any = object.__new__(factory)  # type: ignore[arg-type]
            vars(plugin).update(attributes)
            return plugin
        parameters = inspect.signature(factory).parameters if known else {}
        plugin = factory(**{name: value for name, value in (known or {}).items() if name in parameters}, **arguments)
        if state is not None:
            plugin.load_state_dict(state)
        return plugin
    except Exception as error:
        raise _plugin_failed(key, text, "raised", error) from error


def load_function(text: str, *, kind: str, allow_code: bool) -> Callable[..., Any]:
    """Return the function that a reference names; a class is instantiated, and the instance is called."""
    key = f"plugins.{kind}"
    reference = PluginReference.parse(text, key=key)
    function = _find_plugin(reference, text, kind=kind, allow_code=allow_code)
    if inspect.isclass(function):
        function = make_plugin(text, kind=kind, allow_code=allow_code)
    elif reference.arguments:
        function = functools.partial(function, **reference.arguments)
    if not callable(function):
        raise mistake(key, f"{text!r} is a {type(function).__name__}, which cannot be called")
    return function  # type: ignore[no-any-return]


def load_class_or_function(text: str, *, kind: str, allow_code: bool) -> Callable[..., Any]:
    """Return the class or function that a reference names, without calling it."""
    named = _find_plugin(PluginReference.parse(text, key=f"plugins.{kind}"), text, kind=kind, allow_code=allow_code)
    if not callable(named):
        raise mistake(f"plugins.{kind}", f"{text!r} is a {type(named).__name__}, neither a class nor a function")
    return named  # type: ignore[no-any-return]


def refuse_plugins(plugins: PluginReferences, layout: Layout, *, loss_parallel: bool) -> None:
    """Raise UserError if the layout gives a loss or metric only a part of the vocabulary."""
    if layout.tensor > 1 and loss_parallel:
        for key, reference in (("loss", plugins.loss), ("metrics", plugins.metrics)):
            if reference:
                raise mistake(
                    f"plugins.{key}",
                    f"parallel.tensor = {layout.tensor} with parallel.loss_parallel",
                    why="each rank would see a part of the vocabulary only",
                    fix="set parallel.loss_parallel = false, or parallel.tensor = 1",
                )


def _find_plugin(reference: PluginReference, text: str, *, kind: str, allow_code: bool) -> Any:
    """Return the object that a reference names; import its module only with `allow_code`."""
    key = f"plugins.{kind}"
    if not reference.place:
        return load_entry_point(reference.name, PLUGIN_GROUPS[kind], key=key)
    if not allow_code:
        raise code_refused(key, text)
    try:
        module = load_module(reference.place)
    except UserError:
        raise
    except Exception as error:
        raise _plugin_failed(key, text, "cannot be imported", error) from error
    target: Any = module
    for part in reference.name.split("."):
        if not hasattr(target, part):
            close = nearest(part, vars(target))
            raise mistake(key, f"{reference.place} has no {part}", fix=f"did you mean {close}?" if close else "")
        target = getattr(target, part)
    return target


def load_module(place: str) -> ModuleType:
    """Import a module by its name or by its file; a file whose content has not changed runs once in a process."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = resolve_path(place)
    if not is_file(path):
        raise mistake(place, "there is no such file", why="a job names code of its own by the file it is in")
    name, content = f"phalanx_module_{path.stem}", path.read_bytes()
    loaded = sys.modules.get(name)
    if loaded is not None and vars(loaded).get("__file__") == str(path) and vars(loaded).get("__content__") == content:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["__content__"] = content
    find_neighbours(path)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def install_source(job: Job, *, allow_code: bool) -> None:
    """Create the module from the source that a job carries, so that references to it can be resolved."""
    if not job.plugins.source:
        return
    if not allow_code:
        raise code_refused("plugins.source", f"{plural(len(job.plugins.source), 'line')} of Python")
    text = "\n".join(job.plugins.source) + "\n"
    loaded = sys.modules.get(SOURCE_MODULE)
    if loaded is not None and getattr(loaded, "source_text", None) == text:
        return
    spec = importlib.util.spec_from_loader(SOURCE_MODULE, _TextLoader(text))
    assert spec is not None
    module = sys.modules[SOURCE_MODULE] = importlib.util.module_from_spec(spec)
    vars(module)["source_text"] = text
    # So that tracebacks show its lines.
    linecache.cache[_TextLoader.FILE] = (len(text), None, text.splitlines(keepends=True), _TextLoader.FILE)
    try:
        _TextLoader(text).exec_module(module)
    except Exception as error:
        del sys.modules[SOURCE_MODULE]
        raise _plugin_failed(
            "plugins.source", "the code from the notebook or script", "cannot be run", error
        ) from error


class _TextLoader(importlib.abc.InspectLoader):
    """Loads a module from its source text."""

    FILE = f"<{SOURCE_MODULE}>"

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        """Return the source text."""
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        """Compile the text with a file name that tracebacks can show."""
        return self.source_to_code(self._text, self.FILE)  # type: ignore[return-value, unused-ignore]


def code_refused(key: str, text: str) -> UserError:
    """Return the error for a job that names code which the user has not allowed to run."""
    return mistake(
        key,
        f"{text!r} is code that this job wants to run",
        why="a job file from a stranger could do anything with your account",
        fix="read it, then give --allow-code (allow_code=True in Python)",
    )


def load_entry_point(name: str, group: str, *, key: str) -> Any:
    """Load the entry point of an installed package; `key` is the job's key that names it."""
    if problem := missing_entry_point(name, group):
        raise mistake(key, problem[0], fix=problem[1])
    return next(iter(importlib.metadata.entry_points(group=group, name=name))).load()


def _plugin_failed(key: str, text: str, what: str, error: Exception) -> UserError:
    """Return the error for a plug-in that raised, with the last line of its own code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return mistake(
        key, f"{text} {what}: {type(error).__name__}: {error}"[:500], fix=f"see {last.filename}:{last.lineno}"
    )
