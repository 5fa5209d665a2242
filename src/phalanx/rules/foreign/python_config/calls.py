"""Values of calls: objects of classes, functions of the program, and the few outside functions that are known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.rules.foreign.python_config.possible_values import (
    MISSING,
    MOST_TEXT,
    Built,
    Function,
    Method,
    PythonReference,
    UnknownPython,
    is_plain,
    reason_of,
)

if TYPE_CHECKING:
    from phalanx.rules.foreign.python_config.evaluator import PythonReader

# Methods that change no relevant setting of a configuration object, and those that return the object itself.
HARMLESS = frozenset({"validate", "finalize", "to_cfg_dict", "as_dict", "as_config_dict", "lower"})
HANDED_ON = frozenset({"with_rope_scaling", "with_recommended_evals", "merge", "apply_overrides", "with_wandb"})
# Padded to a multiple of 128: OLMo-core, data/tokenizer.py, TokenizerConfig.dolma2().padded_vocab_size().
PADDED_VOCABULARIES = {"dolma2": 100_352, "dolma2_sigdig": 100_352, "gpt_neox_olmo_dolma_v1_5": 50_304, "gpt2": 50_304}
# Outside functions that only inspect, print or check.
LOOKING = frozenset(
    {
        *("print", "isinstance", "hasattr", "warnings.warn", "seed_all"),
        *(f"{log}.{verb}" for log in ("log", "logger", "logging") for verb in ("info", "warning", "debug")),
    }
)
# Functions of a trainer whose arguments are all that matters: the call itself is kept as the value.
STANDS_FOR_ITSELF = frozenset({"model_registry", "default_adamw"})


def _called_name(callee: object) -> str:
    if isinstance(callee, Function):
        return f"{callee.module}.{_function_name(callee)}"
    return callee.name if isinstance(callee, PythonReference) else ""


def call_value(
    reader: PythonReader,
    callee: object,
    args: list[object],
    keywords: dict[str, object],
    lines: dict[str, int],
    *,
    open_why: str,
    line: int,
    text: str,
) -> object:
    """Return the value of a call; `open_why` is the reason why it may have further arguments."""
    outer, _, last = _called_name(callee).rpartition(".")
    if last in STANDS_FOR_ITSELF:
        return Built(kind=f"{outer}.{last}", fields=keywords, lines=lines, args=args, line=line, opened=open_why)
    # Megatron-Bridge: the name is the only setting
    if last == "get_mixed_precision_config" and len(args) == 1:
        return args[0]
    if isinstance(callee, Function):
        return reader.call_function(callee, args, keywords, whole=not open_why)
    if isinstance(callee, PythonReference):
        return _call_outside(reader, callee, args, keywords, lines, open_why=open_why, line=line)
    if isinstance(callee, Method):
        return _call_method(reader, callee, args, keywords, lines, line=line)
    if isinstance(callee, Built) and callee.kind.endswith("partial") and callee.args:
        first, *bound_arguments = callee.args
        all_keywords = {**callee.fields, **keywords}
        return call_value(
            reader,
            first,
            [*bound_arguments, *args],
            all_keywords,
            {**callee.lines, **lines},
            open_why=open_why,
            line=line,
            text=text,
        )
    why = callee.why if isinstance(callee, UnknownPython) else f"{text}() is not read"
    return _unread_call(reader, args, keywords, why)


def _unread_call(reader: PythonReader, args: list[object], keywords: Mapping[str, object], why: str) -> UnknownPython:
    """Return an unknown value for a function that is not read, and mark its arguments as possibly changed."""
    for argument in (*args, *keywords.values()):
        reader.open_value(argument, why)
    return UnknownPython(why)


def _call_outside(
    reader: PythonReader,
    callee: PythonReference,
    args: list[object],
    keywords: dict[str, object],
    lines: dict[str, int],
    *,
    open_why: str,
    line: int,
) -> object:
    last = callee.name.rpartition(".")[2]
    if last in ("Config", "Partial") and args and _is_nemo_run(callee.name):
        # nemo_run: run.Config(Class, field=value) represents Class(field=value)
        first = args[0]
        kind = first.name if isinstance(first, PythonReference) else _function_name(first)
        return Built(kind=f"{last} {kind}", fields=keywords, lines=lines, args=args[1:], line=line, opened=open_why)
    if callee.name in ("functools.partial", "partial"):
        return Built(kind="functools.partial", fields=keywords, lines=lines, args=args, line=line, opened=open_why)
    if callee.name in ("dataclasses.replace", "copy.deepcopy", "copy.copy", "typing.cast", "cast", "deepcopy"):
        return _copied(reader, last, args, keywords, lines)
    if callee.name in ("dataclasses.fields", "fields") and len(args) == 1 and isinstance(args[0], Built):
        if args[0].opened:
            return UnknownPython(args[0].opened)
        return [Built(kind="dataclasses.Field", fields={"name": name}) for name in args[0].fields]
    if last == "getattr" and len(args) >= 2 and isinstance(args[1], str):
        return _read_named(reader, args)
    if last == "setattr" and len(args) == 3 and isinstance(args[0], Built) and isinstance(args[1], str):
        reader.journal.write(args[0].fields, args[1], args[2])  # type: ignore[arg-type]
        return None
    if callee.name in PURE:
        return _pure_call(callee.name, args, keywords)
    if callee.name in LOOKING:
        return UnknownPython(f"{callee.name}() is not worked out")
    if callee.is_class:
        return Built(kind=callee.name, fields=keywords, lines=lines, args=args, line=line, opened=open_why)
    return _unread_call(reader, args, keywords, f"comes from {callee.name}(), which is not read")


def _is_nemo_run(name: str) -> bool:
    return name in ("run.Config", "run.Partial") or name.startswith("nemo_run.")


def _function_name(value: object) -> str:
    return getattr(value.node, "name", "") if isinstance(value, Function) else ""


def _copied(
    reader: PythonReader, name: str, args: list[object], keywords: dict[str, object], lines: dict[str, int]
) -> object:
    source = args[-1] if args else UnknownPython("is a copy of nothing")
    if name == "cast":
        return source
    if isinstance(source, Built):
        copied = _deep_copy(source)
        assert isinstance(copied, Built)
        return replace(copied, fields={**copied.fields, **keywords}, lines={**copied.lines, **lines})
    return _deep_copy(source)


def _deep_copy(value: object) -> object:
    """Copy objects and containers; functions and references are not copied."""
    if isinstance(value, Built):
        return replace(
            value,
            fields={name: _deep_copy(item) for name, item in value.fields.items()},
            lines=dict(value.lines),
            args=[_deep_copy(item) for item in value.args],
        )
    if isinstance(value, list):
        return [_deep_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    return copy.copy(value) if is_plain(value) else value


def _read_named(reader: PythonReader, args: list[object]) -> object:
    owner, name = args[0], args[1]
    assert isinstance(name, str)
    if isinstance(owner, Built):
        if name in owner.fields:
            return owner.fields[name]
        return UnknownPython(owner.opened or f"depends on the default of {name}")
    if isinstance(owner, PythonReference):
        return PythonReference(f"{owner.name}.{name}")
    return UnknownPython(reason_of(owner))


# ---- functions of Python --------------------------------------------------------------------------------------------


def _whole_number(value: object) -> object:
    return int(value) if isinstance(value, int | float | str) else UnknownPython(reason_of(value))


def _joined_path(*parts: object) -> object:
    if all(isinstance(part, str) for part in parts):
        return "/".join(str(part).rstrip("/") for part in parts)[:MOST_TEXT]
    return UnknownPython("is a path made of what is not known")


PURE: dict[str, Callable[..., object]] = {
    "int": _whole_number,
    "float": lambda value: float(value),
    "str": lambda value="": str(value),
    "bool": lambda value=False: bool(value),
    "len": lambda value: len(value),
    "max": lambda *values: max(*values),
    "min": lambda *values: min(*values),
    "abs": lambda value: abs(value),
    "round": lambda value, digits=None: round(value, digits),
    "list": lambda value=(): list(value),
    "tuple": lambda value=(): tuple(value),
    "dict": lambda **fields: dict(fields),
    "os.path.join": _joined_path,
}


def _pure_call(name: str, args: list[object], keywords: Mapping[str, object]) -> object:
    if name == "dict" and len(args) == 1 and isinstance(args[0], dict):
        return {**args[0], **keywords}
    if name == "dict" and not args:
        return dict(keywords)
    values = (*args, *keywords.values())
    if name not in ("list", "tuple", "len") and not all(is_plain(argument) for argument in values):
        return UnknownPython(reason_of(*values))
    try:
        return PURE[name](*args, **keywords)
    except (TypeError, ValueError, ArithmeticError):
        return UnknownPython(f"is {name}() of something else")


# ---- methods --------------------------------------------------------------------------------------------------------


def _call_method(
    reader: PythonReader,
    callee: Method,
    args: list[object],
    keywords: dict[str, object],
    lines: dict[str, int],
    *,
    line: int,
) -> object:
    owner, name = callee.owner, callee.name
    if isinstance(owner, Built):
        return _object_method(reader, owner, name, args, keywords, lines, line=line)
    if isinstance(owner, list):
        return _list_method(reader, owner, name, args)
    if isinstance(owner, dict):
        return _dict_method(reader, owner, name, args, keywords)
    text_methods = ("lower", "upper", "strip", "startswith", "endswith", "replace", "split")
    if isinstance(owner, str) and name in text_methods and all(isinstance(argument, str) for argument in args):
        result = getattr(owner, name)(*args)
        return result if not isinstance(result, str) or len(result) < MOST_TEXT else UnknownPython("is too long a text")
    return UnknownPython(f"comes from .{name}(), which is not read")


def _object_method(
    reader: PythonReader,
    owner: Built,
    name: str,
    args: list[object],
    keywords: dict[str, object],
    lines: dict[str, int],
    *,
    line: int,
) -> object:
    if name in ("with_callback", "with_callbacks") and len(args) == 2 and isinstance(args[0], str):
        callbacks = reader.read_attribute(owner, "callbacks")
        if isinstance(callbacks, Built):
            reader.journal.write(callbacks.fields, args[0], args[1])  # type: ignore[arg-type]
        return owner
    if name == "with_callbacks" and len(args) == 1 and isinstance(args[0], dict):
        callbacks = reader.read_attribute(owner, "callbacks")
        if isinstance(callbacks, Built):
            for key, callback in args[0].items():
                reader.journal.write(callbacks.fields, str(key), callback)  # type: ignore[arg-type]
        return owner
    if name == "replace" and not args:
        return _copied(reader, name, [owner], keywords, lines)
    if name in HANDED_ON:
        return owner
    if name == "padded_vocab_size":
        tokenizer = owner.kind.rpartition(".")[2]
        return PADDED_VOCABULARIES.get(tokenizer, UnknownPython(f"is the vocabulary of {tokenizer}"))
    if name in HARMLESS:
        return UnknownPython(f"comes from .{name}(), which is not worked out")
    if owner.kind.rpartition(".")[2].startswith("from_hf") or not owner.fields:
        # A builder: AutoBridge.from_hf_pretrained("…").get_model_config()
        return Built(kind=f"{owner.kind}.{name}", fields=keywords, lines=lines, args=[*owner.args, *args], line=line)
    why = f"may be changed by .{name}(), which is not read"
    reader.open_value(owner, why)
    return _unread_call(reader, args, keywords, why)


def _list_method(reader: PythonReader, owner: list[object], name: str, args: list[object]) -> object:
    if name == "append" and len(args) == 1:
        reader.journal.replace_list(owner, [*owner, args[0]])
        return None
    if name == "extend" and len(args) == 1 and isinstance(args[0], list | tuple):
        reader.journal.replace_list(owner, [*owner, *args[0]])
        return None
    if name in ("copy", "index", "count"):
        return list(owner) if name == "copy" else UnknownPython(f"comes from .{name}()")
    reader.open_value(owner, f"is changed by .{name}()")
    return UnknownPython(f"comes from .{name}()")


def _dict_method(
    reader: PythonReader, owner: dict[object, object], name: str, args: list[object], keywords: Mapping[str, object]
) -> object:
    if name == "get" and args and is_plain(args[0]):
        return owner.get(args[0], args[1] if len(args) > 1 else None)
    if name == "update" and (not args or isinstance(args[0], dict)):
        updates = args[0] if args else {}
        assert isinstance(updates, dict)
        for key, value in {**updates, **keywords}.items():
            reader.journal.write(owner, key, value)
        return None
    if name == "pop" and args and is_plain(args[0]):
        value = owner.get(args[0], args[1] if len(args) > 1 else UnknownPython(f"has no key {str(args[0])[:40]}"))
        reader.journal.write(owner, args[0], MISSING)
        return value
    if name in ("items", "keys", "values", "copy"):
        entries = getattr(owner, name)()
        return (
            [tuple(entry) if isinstance(entry, tuple) else entry for entry in entries]
            if name != "copy"
            else dict(entries)
        )
    reader.open_value(owner, f"is changed by .{name}()")
    return UnknownPython(f"comes from .{name}()")
