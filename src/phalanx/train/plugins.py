"""Code of the user's own: callbacks, loss, optimizer, data and metrics, from the job file or from Python objects.

A job names each as a reference: "file.py:name", "package.module:name", or the name of an entry point, with keyword
arguments as a JSON object behind it if there are any. Every rank is a process of its own and loads them itself; nothing
is pickled. `attach` makes references of Python objects: of a class or function that lives in a file its place, and of
one that lives in a notebook or script its source, which the job then carries.

Files and modules that a job names are run only with consent (`--allow-code`); an entry point was installed on purpose.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import linecache
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.errors import UserError, mistake, nearest
from phalanx.job.schema import Job, PluginReferences
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.train.callbacks import Callback

if TYPE_CHECKING:
    from torch import Tensor

SOURCE_MODULE = "phalanx_job_source"  # the name of the module that the job carries
ATTRIBUTES = "__attributes__"  # arguments that are an object's attributes, not its constructor's
STATE = "__state__"  # arguments that are a state_dict()
ENTRY_POINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
GROUPS = {
    "callbacks": "phalanx.callbacks",
    "loss": "phalanx.losses",
    "optimizer": "phalanx.optimizers",
    "data": "phalanx.datasets",
    "metrics": "phalanx.metrics",
}
PlanOrJob = TypeVar("PlanOrJob", Plan, Job)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPlugins:
    """What a rank has loaded for its loop; the engine loads loss and optimizer itself."""

    callbacks: tuple[Callback, ...] = ()
    metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    data: Any = None


# ---- from a reference to an object -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginReference:
    """A reference as the job has it.

    >>> PluginReference.parse('log.py:LossLog {"every": 10}', key="plugins.callbacks").arguments
    {'every': 10}
    """

    place: str  # a file, a module, or "" for an entry point
    name: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str, *, key: str) -> PluginReference:
        """Raises UserError where it has another form."""
        head, brace, rest = text.partition("{")
        place, _, name = head.strip().rpartition(":")
        try:
            arguments = json.loads(brace + rest) if brace else {}
        except ValueError as error:
            raise mistake(key, f"{text!r} ends in something that is not JSON: {error}") from error
        names_code = all(part.isidentifier() for part in name.split(".")) if place else ENTRY_POINT.fullmatch(name)
        if not names_code:
            raise mistake(
                key,
                f"{text!r} names no code",
                fix='write "file.py:name", "package.module:name" or the name of an entry point',
            )
        return cls(place=place, name=name, arguments=arguments)


def needs_consent(job: Job) -> list[str]:
    """Keys of the job that name code which is run only with consent: all but entry points."""
    found = ["model.module"] if job.model.module else []
    for key, text in _references(job.plugins):
        if PluginReference.parse(text, key=f"plugins.{key}").place:
            found.append(f"plugins.{key}")
    if job.plugins.source:
        found.append("plugins.source")
    return list(dict.fromkeys(found))


def absolute_references(plugins: PluginReferences, base: Path) -> PluginReferences:
    """With files as absolute paths; relative ones start at the job's folder."""

    def absolute(text: str) -> str:
        head, brace, rest = text.partition("{")
        place, colon, name = head.rpartition(":")
        return f"{(base / place).resolve()}{colon}{name}{brace}{rest}" if place.endswith(".py") else text

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
    found: Any = _find(reference, text, kind=kind, allow_code=allow_code)
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
        raise _failed(key, text, "raised", error) from error


def load_function(text: str, *, kind: str, allow_code: bool) -> Callable[..., Any]:
    """The function a reference stands for; a class is made an object that is called."""
    key = f"plugins.{kind}"
    reference = PluginReference.parse(text, key=key)
    found = _find(reference, text, kind=kind, allow_code=allow_code)
    if inspect.isclass(found):
        found = make_plugin(text, kind=kind, allow_code=allow_code)
    elif reference.arguments:
        found = functools.partial(found, **reference.arguments)
    if not callable(found):
        raise mistake(key, f"{text!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def load_class_or_function(text: str, *, kind: str, allow_code: bool) -> Callable[..., Any]:
    """What a reference names, not called."""
    found = _find(PluginReference.parse(text, key=f"plugins.{kind}"), text, kind=kind, allow_code=allow_code)
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


def _find(reference: PluginReference, text: str, *, kind: str, allow_code: bool) -> Any:
    key = f"plugins.{kind}"
    if not reference.place:
        return _entry_point(reference.name, kind=kind)
    if not allow_code:
        raise code_refused(key, text)
    try:
        module = load_module(reference.place)
    except UserError:
        raise
    except Exception as error:
        raise _failed(key, text, "cannot be imported", error) from error
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
    path = Path(place).resolve()
    if not path.is_file():
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
        raise code_refused("plugins.source", f"{len(job.plugins.source)} lines of Python")
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
        raise _failed("plugins.source", "the code from the notebook or script", "cannot be run", error) from error


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
        fix="read it, then give --allow-code",
    )


def _entry_point(name: str, *, kind: str) -> Any:
    found = {point.name: point for point in importlib.metadata.entry_points(group=GROUPS[kind])}
    if name not in found:
        close = nearest(name, found)
        raise mistake(
            f"plugins.{kind}",
            f"no installed package offers {name!r} as an entry point of {GROUPS[kind]}",
            fix=f"did you mean {close}?" if close else 'for a file write "file.py:name"',
        )
    return found[name].load()


def _failed(key: str, text: str, what: str, error: Exception) -> UserError:
    """The user's own mistake, with the last line of the user's own code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return mistake(
        key, f"{text} {what}: {type(error).__name__}: {error}"[:500], fix=f"see {last.filename}:{last.lineno}"
    )


def _references(plugins: PluginReferences) -> list[tuple[str, str]]:
    single = [(key, getattr(plugins, key)) for key in ("loss", "optimizer", "data")]
    several = [(key, text) for key in ("callbacks", "metrics") for text in getattr(plugins, key)]
    return [(key, text) for key, text in (*several, *single) if text]


# ---- from an object to a reference -----------------------------------------------------------------------------------


def attach(
    plan_or_job: PlanOrJob,
    *,
    callbacks: Sequence[Any] = (),
    loss: Any = None,
    optimizer: Any = None,
    data: Any = None,
    model: Any = None,
    metrics: Sequence[Any] = (),
) -> PlanOrJob:
    """The plan or job with these objects as its plug-ins; each may be a reference (text), a class or a function.

    Callbacks and data may also be instances whose attributes are JSON values, or that `state_dict()` describes; a
    `functools.partial` carries keyword arguments. Raises UserError for what cannot reach another process.
    """
    job: Job = plan_or_job.job if isinstance(plan_or_job, Plan) else plan_or_job
    writer: _SourceWriter = _SourceWriter(job.plugins.source)
    plugins = dataclasses.replace(
        job.plugins,
        callbacks=(*job.plugins.callbacks, *(writer.reference(one, "callbacks") for one in callbacks)),
        metrics=(*job.plugins.metrics, *(writer.reference(one, "metrics") for one in metrics)),
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


class _SourceWriter:
    """Makes references; what lives in no file that can be imported again is gathered as source."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._imports: list[str] = []
        self._text = list(lines)
        self._seen: set[str] = set()

    def lines(self) -> list[str]:
        """The module that the job carries."""
        return [*self._imports, *self._text]

    def reference(self, thing: Any, kind: str) -> str:
        """The reference of an object."""
        if isinstance(thing, str):
            return thing
        if isinstance(thing, functools.partial):
            if thing.args:
                raise self._refused(thing.func, kind, "a partial with positional arguments", "use keyword arguments")
            return self._with_arguments(self.reference(thing.func, kind), self._json(thing.keywords, thing.func, kind))
        if inspect.isclass(thing) or inspect.isfunction(thing):
            return self._place(thing, kind)
        return self._instance(thing, kind)

    def _instance(self, thing: Any, kind: str) -> str:
        cls = type(thing)
        place = self._place(cls, kind)
        attributes = getattr(thing, "__dict__", None)
        if attributes is not None and _is_json(attributes):
            return self._with_arguments(place, {ATTRIBUTES: dict(attributes)} if attributes else {})
        wrong = [name for name, value in (attributes or {}).items() if not _is_json(value)]
        required = [
            name
            for name, one in inspect.signature(cls).parameters.items()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if required or not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            raise self._refused(
                cls,
                kind,
                f"an instance whose {', '.join(wrong[:4]) or 'attributes'} cannot be written as JSON",
                "give a function that makes it, or make these attributes when training starts",
            )
        return self._with_arguments(place, {STATE: self._json(thing.state_dict(), cls, kind)})

    def _place(self, thing: Any, kind: str) -> str:
        module, name = thing.__module__, thing.__qualname__
        if "<locals>" in name:
            raise self._refused(thing, kind, "defined inside a function", "define it at the top level of its file")
        if "<lambda>" in name:
            raise self._refused(thing, kind, "a lambda", "write it as a function with a name")
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        if module != "__main__" and _is_installed(module):
            return f"{module}:{name}"
        if module != "__main__" and file.endswith(".py") and Path(file).is_file():
            return f"{Path(file).resolve()}:{name}"
        self._add(thing, kind)
        return f"{SOURCE_MODULE}:{name}"

    def _add(self, thing: Any, kind: str) -> None:
        """The source of a class or function of a notebook or script, and of what it uses."""
        if thing.__qualname__ in self._seen:
            return
        self._seen.add(thing.__qualname__)
        try:
            text = _source_of(thing)
        except (OSError, TypeError) as error:
            raise self._refused(thing, kind, f"without source: {error}", "put it in a file, and import it") from error
        tree, scope = ast.parse(text), _globals_of(thing)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {thing.__name__}
        for name in sorted(names & scope.keys()):
            self._add_global(name, scope[name], thing, kind)
        self._text += ["", "", *text.expandtabs(4).rstrip().splitlines()]

    def _add_global(self, name: str, value: Any, user: Any, kind: str) -> None:
        """A name that the source uses: an import, another definition, or a constant."""
        if name in self._seen or hasattr(builtins, name):
            return
        line = ""
        if isinstance(value, ModuleType):
            line = f"import {value.__name__} as {name}"
        elif (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__ not in ("__main__", None):
            top, _, rest = value.__qualname__.partition(".")
            if rest:
                raise self._refused(user, kind, f"uses {name}, a {value.__qualname__}", "import its class instead")
            line = f"from {value.__module__} import {top} as {name}"
        elif inspect.isclass(value) or inspect.isfunction(value):
            self._add(value, kind)
            return
        elif _is_json(value):
            line = f"{name} = {value!r}"
        else:
            raise self._refused(
                user,
                kind,
                f"uses the variable {name}, a {type(value).__name__}",
                "make it inside, or give it as an attribute that JSON can hold",
            )
        self._seen.add(name)
        self._imports.append(line)

    def _with_arguments(self, reference: str, arguments: Mapping[str, Any]) -> str:
        return f"{reference} {json.dumps(dict(arguments))}" if arguments else reference

    def _json(self, value: Mapping[str, Any], thing: Any, kind: str) -> dict[str, Any]:
        if not _is_json(value):
            raise self._refused(thing, kind, "with arguments that cannot be written as JSON", "use plain values")
        return dict(value)

    @staticmethod
    def _refused(thing: Any, kind: str, what: str, fix: str) -> UserError:
        return mistake(
            f"{kind}: {getattr(thing, '__qualname__', thing)}",
            f"is {what}" if not what.startswith("uses") else what,
            why="ranks are processes of their own, and load it by name or from its source",
            fix=fix,
        )


def _is_installed(module: str) -> bool:
    """Whether any process here can import a module: not only one started in this folder or beside this script."""
    top, script = module.partition(".")[0], getattr(sys.modules.get("__main__"), "__file__", None)
    here = {Path().resolve(), *([Path(script).resolve().parent] if script else [])}
    paths = [one for one in sys.path if one and Path(one).resolve() not in here]
    if top in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(top, paths) is not None:
        return True
    editable = [one for one in sys.meta_path if getattr(one, "__module__", "").startswith("__editable__")]
    return any(one.find_spec(top, None) is not None for one in editable)


def _source_of(thing: Any) -> str:
    """The source of a class or function, also of a class in a notebook, which `inspect` does not find there."""
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        methods = [one for one in vars(thing).values() if inspect.isfunction(one)] if inspect.isclass(thing) else []
        for method in methods:  # whose code knows its cell
            text = "".join(linecache.getlines(method.__code__.co_filename))
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
        raise


def _globals_of(thing: Any) -> dict[str, Any]:
    if inspect.isfunction(thing):
        return thing.__globals__
    return vars(sys.modules[thing.__module__])


def _is_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it was."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
