"""Code of the user's own: callbacks, loss, optimizer, data and metrics, from the job file or from Python objects.

A job names each as a reference: "file.py:name", "package.module:name", or the name of an entry point, with keyword
arguments as a JSON object behind it if there are any. Every rank is a process of its own and loads them itself; nothing
is pickled. `attach_plugins.py` makes references of Python objects: of a class or function that lives in a file its
place, and of one that lives in a notebook or script its source, which the job then carries.

Files and modules that a job names are run only with consent (`--allow-code`); an entry point was installed on purpose.
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

ATTRIBUTES = "__attributes__"  # arguments that are an object's attributes, not its constructor's
STATE = "__state__"  # arguments that are a state_dict()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPlugins:
    """What a rank has loaded for its loop; the engine loads loss and optimizer itself."""

    callbacks: tuple[Callback, ...] = ()
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    data: Any = None


def needs_consent(job: Job) -> list[str]:
    """Keys of the job that name code which is run only with consent: all but entry points."""
    found = ["model.module"] if runs_named_code(job.model.module) else []
    found += [f"plugins.{key}" for key, text in list_references(job.plugins) if runs_named_code(text)]
    if job.plugins.source:
        found.append("plugins.source")
    return list(dict.fromkeys(found))


def absolute_references(plugins: PluginReferences, base: Path) -> PluginReferences:
    """With files as absolute paths; relative ones start at the job's folder."""

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
    """Callbacks, metrics and data of a job, made for this rank; raises UserError for what cannot be loaded."""
    plugins = job.plugins
    install_source(job, allow_code=allow_code)
    callbacks = []
    for text in plugins.callbacks:
        made = make_plugin(text, kind="callbacks", allow_code=allow_code)
        if not isinstance(made, Callback):
            raise mistake(
                "plugins.callbacks",
                f"{text!r} made a {type(made).__name__}",
                fix="subclass phalanx.Callback",
            )
        callbacks.append(made)
    metrics = {
        PluginReference.parse(text, key="plugins.metrics").name: load_function(
            text, kind="metrics", allow_code=allow_code
        )
        for text in plugins.metrics
    }
    known = {"sequence": job.data.sequence, "seed": job.data.seed, "vocab": job.model.vocab}
    data = make_plugin(plugins.data, kind="data", allow_code=allow_code, known=known) if plugins.data else None
    return LoadedPlugins(callbacks=tuple(callbacks), metrics=metrics, data=data)


def make_plugin(text: str, *, kind: str, allow_code: bool, known: Mapping[str, Any] | None = None) -> Any:
    """The object a reference stands for: a class or function is called, with those of `known` that it takes."""
    key = f"plugins.{kind}"
    reference = PluginReference.parse(text, key=key)
    found: Any = _find_plugin(reference, text, kind=kind, allow_code=allow_code)
    if not callable(found) or (not inspect.isclass(found) and not inspect.isroutine(found)):
        return found
    arguments = dict(reference.arguments)
    attributes, state = arguments.pop(ATTRIBUTES, None), arguments.pop(STATE, None)
    try:
        if attributes is not None:
            made: Any = object.__new__(found)  # type: ignore[arg-type]
            vars(made).update(attributes)
            return made
        taken = inspect.signature(found).parameters if known else {}
        made = found(**{name: value for name, value in (known or {}).items() if name in taken}, **arguments)
        if state is not None:
            made.load_state_dict(state)
        return made
    except Exception as error:
        raise _plugin_failed(key, text, "raised", error) from error


def load_function(text: str, *, kind: str, allow_code: bool) -> Callable[..., Any]:
    """The function a reference stands for; a class is made an object that is called."""
    key = f"plugins.{kind}"
    reference = PluginReference.parse(text, key=key)
    found = _find_plugin(reference, text, kind=kind, allow_code=allow_code)
    if inspect.isclass(found):
        found = make_plugin(text, kind=kind, allow_code=allow_code)
    elif reference.arguments:
        found = functools.partial(found, **reference.arguments)
    if not callable(found):
        raise mistake(key, f"{text!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def load_class_or_function(text: str, *, kind: str, allow_code: bool) -> Callable[..., Any]:
    """What a reference names, not called."""
    found = _find_plugin(PluginReference.parse(text, key=f"plugins.{kind}"), text, kind=kind, allow_code=allow_code)
    if not callable(found):
        raise mistake(f"plugins.{kind}", f"{text!r} is a {type(found).__name__}, neither a class nor a function")
    return found  # type: ignore[no-any-return]


def refuse_plugins(plugins: PluginReferences, layout: Layout, *, loss_parallel: bool) -> None:
    """Raises UserError where a layout would hand plug-ins less than they were written for."""
    if layout.tensor > 1 and loss_parallel:
        for key, given in (("loss", plugins.loss), ("metrics", plugins.metrics)):
            if given:
                raise mistake(
                    f"plugins.{key}",
                    f"parallel.tensor = {layout.tensor} with parallel.loss_parallel",
                    why="each rank would see a part of the vocabulary only",
                    fix="set parallel.loss_parallel = false, or parallel.tensor = 1",
                )


def _find_plugin(reference: PluginReference, text: str, *, kind: str, allow_code: bool) -> Any:
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
    found: Any = module
    for part in reference.name.split("."):
        if not hasattr(found, part):
            close = nearest(part, vars(found))
            raise mistake(key, f"{reference.place} has no {part}", fix=f"did you mean {close}?" if close else "")
        found = getattr(found, part)
    return found


def load_module(place: str) -> ModuleType:
    """A module by its name, or by its file; a file that did not change is run once in a process."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = resolve_path(place)
    if not is_file(path):
        raise mistake(place, "there is no such file", why="a job names code of its own by the file it is in")
    name, content = f"phalanx_module_{path.stem}", path.read_bytes()
    known = sys.modules.get(name)
    if known is not None and vars(known).get("__file__") == str(path) and vars(known).get("__content__") == content:
        return known
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
    """Make the module that a job carries, so that references to it are found."""
    if not job.plugins.source:
        return
    if not allow_code:
        raise code_refused("plugins.source", f"{plural(len(job.plugins.source), 'line')} of Python")
    text = "\n".join(job.plugins.source) + "\n"
    known = sys.modules.get(SOURCE_MODULE)
    if known is not None and getattr(known, "source_text", None) == text:
        return
    spec = importlib.util.spec_from_loader(SOURCE_MODULE, _TextLoader(text))
    assert spec is not None
    module = sys.modules[SOURCE_MODULE] = importlib.util.module_from_spec(spec)
    vars(module)["source_text"] = text
    # tracebacks show its lines
    linecache.cache[_TextLoader.FILE] = (len(text), None, text.splitlines(keepends=True), _TextLoader.FILE)
    try:
        _TextLoader(text).exec_module(module)
    except Exception as error:
        del sys.modules[SOURCE_MODULE]
        raise _plugin_failed(
            "plugins.source", "the code from the notebook or script", "cannot be run", error
        ) from error


class _TextLoader(importlib.abc.InspectLoader):
    """Loads a module from its text."""

    FILE = f"<{SOURCE_MODULE}>"

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        """The text."""
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        """Compiled, with a file name that tracebacks can show."""
        return self.source_to_code(self._text, self.FILE)  # type: ignore[return-value, unused-ignore]


def code_refused(key: str, text: str) -> UserError:
    """The job names code, and nobody said that it may be run."""
    return mistake(
        key,
        f"{text!r} is code that this job wants to run",
        why="a job file from a stranger could do anything with your account",
        fix="read it, then give --allow-code (allow_code=True in Python)",
    )


def load_entry_point(name: str, group: str, *, key: str) -> Any:
    """What an installed package offers under a name; `key` of the job asks for it."""
    if problem := missing_entry_point(name, group):
        raise mistake(key, problem[0], fix=problem[1])
    return next(iter(importlib.metadata.entry_points(group=group, name=name))).load()


def _plugin_failed(key: str, text: str, what: str, error: Exception) -> UserError:
    """The user's own mistake, with the last line of the user's own code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return mistake(
        key, f"{text} {what}: {type(error).__name__}: {error}"[:500], fix=f"see {last.filename}:{last.lineno}"
    )
