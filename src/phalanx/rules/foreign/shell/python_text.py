"""Static reader of Python programs within a script (`python -c`, `python - << EOF`): what they print and write.

It evaluates constants, arithmetic, tables, f-strings, `json` and `math`, statement by statement, and runs no program.
Anything else, or an unknown value, ends the evaluation: the output is then unknown, and the files that the program
names may hold anything.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.rules.foreign.python_config.expressions import ARITHMETIC
from phalanx.rules.foreign.shell.partial_text import is_known

MOST_PROGRAM = 20_000  # characters
MOST_NUMBER = 10**15
ReadFile = Callable[[str], str | None]
NAMED_FILE = re.compile(r"[\w./-]+\.(?:json|ya?ml|toml|sh|env|conf|txt|cfg)\b")
_WRITES = re.compile(r"""\bdump\(|\.write\(|write_text|["']w\+?["']|savetxt|to_json""")


class NotFollowedError(Exception):
    """A program that does more than this reader supports."""


@dataclass(kw_only=True, slots=True)
class PythonEffects:
    """The text that a program printed, and the contents of its files afterwards."""

    printed: str = ""
    written: dict[str, str] = field(default_factory=dict)


def follow_python(text: str, read: ReadFile) -> PythonEffects | None:
    """Return the effects of a program; None if it is not supported."""
    if not is_known(text) or len(text) > MOST_PROGRAM:
        return None
    try:
        reader = _ProgramReader(read)
        for node in ast.parse(text).body:
            reader.run_statement(node)
    except (NotFollowedError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    except (TypeError, KeyError, IndexError, ZeroDivisionError, OverflowError, AttributeError):
        return None  # it would end with an error
    return reader.effects


def program_text(rest: list[str], given: str | None) -> str | None:
    """Return the program given to `python` in place of a file; None if it is a file."""
    if len(rest) == 2 and rest[0] == "-c":
        return rest[1]
    return given if rest in ([], ["-"]) else None


def files_it_may_write(text: str) -> list[str]:
    """Return the names of files in a program that writes files.

    >>> files_it_may_write('json.dump(c, open("ds.json", "w"))'), files_it_may_write('print(open("a.json").read())')
    (['ds.json'], [])
    """
    return NAMED_FILE.findall(text) if _WRITES.search(text) else []


_COMPARED: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "round": round,
    "max": max,
    "min": min,
    "abs": abs,
    "len": len,
    "dict": dict,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
}
_MODULES = frozenset({"json", "math", "sys", "os"})


class _ProgramReader:
    """Evaluates the statements of one program."""

    def __init__(self, read: ReadFile) -> None:
        self.read, self.names, self.effects = read, dict[str, Any](), PythonEffects()
        self.targets: dict[str, str] = {}  # a file object's name -> the file

    def run_statement(self, node: ast.stmt) -> None:
        """Evaluate a statement; raise NotFollowedError if it is not supported."""
        match node:
            case ast.Import(names=names) if all(alias.name in _MODULES and alias.asname is None for alias in names):
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self._value(value)
            case ast.Assign(targets=[ast.Subscript(value=table, slice=key)], value=value):
                self._value(table)[self._value(key)] = self._value(value)
            case ast.With(items=[ast.withitem(context_expr=opened, optional_vars=ast.Name(id=name))], body=body):
                self._use_file(opened, name, body)
            case ast.If(test=test, body=body, orelse=otherwise):
                for statement in body if self._value(test) else otherwise:
                    self.run_statement(statement)
            case ast.Expr(value=ast.Call() as call):
                self._run_call(call)
            case ast.Pass():
                return
            case _:
                raise NotFollowedError

    def _use_file(self, opened: ast.expr, name: str, body: list[ast.stmt]) -> None:
        file, writes = self._opened(opened)
        if writes:
            self.targets[name] = file
        else:
            self.names[name] = _FileText(self._text_of(file))
        for statement in body:
            self.run_statement(statement)

    def _opened(self, node: ast.expr) -> tuple[str, bool]:
        match node:
            case ast.Call(func=ast.Name(id="open"), args=[name]):
                return str(self._value(name)), False
            case ast.Call(func=ast.Name(id="open"), args=[name, ast.Constant(value="r" | "w" as mode)]):
                return str(self._value(name)), mode == "w"
        raise NotFollowedError

    def _text_of(self, file: str) -> str:
        text = self.effects.written.get(file) or self.read(file)
        if text is None or not is_known(text):
            raise NotFollowedError
        return text

    def _target(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and node.id in self.targets:
            return self.targets[node.id]
        file, writes = self._opened(node)
        if not writes:
            raise NotFollowedError
        return file

    def _run_call(self, call: ast.Call) -> None:
        match ast.unparse(call.func):
            case "print":
                if any(keyword.arg not in ("end",) for keyword in call.keywords):
                    raise NotFollowedError
                end = next((str(self._value(keyword.value)) for keyword in call.keywords), "\n")
                self.effects.printed += " ".join(str(self._value(argument)) for argument in call.args) + end
            case "json.dump" if len(call.args) == 2:
                self.effects.written[self._target(call.args[1])] = json.dumps(self._value(call.args[0]), indent=1)
            case _ if isinstance(call.func, ast.Attribute) and call.func.attr == "write" and len(call.args) == 1:
                target, text = self._target(call.func.value), str(self._value(call.args[0]))
                self.effects.written[target] = self.effects.written.get(target, "") + text
            case _ if isinstance(call.func, ast.Attribute) and call.func.attr in ("update", "pop", "setdefault"):
                self._value(call)
            case _:
                raise NotFollowedError

    def _value(self, node: ast.expr) -> Any:
        value = self._worked_out(node)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > MOST_NUMBER:
            raise NotFollowedError
        if isinstance(value, str) and len(value) > MOST_PROGRAM:
            raise NotFollowedError
        return value

    def _worked_out(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value) if isinstance(value, int | float | str | bool | None):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                left_value, right_value = self._value(left), self._value(right)
                if isinstance(op, ast.Mod | ast.Mult) and not all(
                    isinstance(operand, int | float) for operand in (left_value, right_value)
                ):
                    raise NotFollowedError  # "%s" % x, and repeated texts
                return ARITHMETIC[type(op)](left_value, right_value)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._value(inner)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return not self._value(inner)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                return _COMPARED[type(op)](self._value(left), self._value(right))
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                return self._value(body) if self._value(test) else self._value(otherwise)
            case ast.Dict(keys=keys, values=values) if all(keys):
                return {
                    self._value(key): self._value(value_node)
                    for key, value_node in zip(keys, values, strict=True)
                    if key
                }
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item) for item in items]
            case ast.Subscript(value=table, slice=key) if not isinstance(key, ast.Slice):
                return self._value(table)[self._value(key)]
            case ast.JoinedStr(values=parts):
                return "".join(self._joined(part) for part in parts)
            case ast.Call():
                return self._called(node)
        raise NotFollowedError

    def _joined(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue):
            if node.format_spec is not None or node.conversion != -1:
                raise NotFollowedError
            return str(self._value(node.value))
        return str(self._value(node))

    def _called(self, call: ast.Call) -> Any:
        name, args = ast.unparse(call.func), call.args
        if name == "json.dumps" and args:
            return json.dumps(self._value(args[0]))
        if name == "json.load" and len(args) == 1:
            file_text = self.names.get(args[0].id) if isinstance(args[0], ast.Name) else None
            text = file_text.text if isinstance(file_text, _FileText) else self._text_of(self._opened(args[0])[0])
            return json.loads(text)
        if name in _FUNCTIONS and not (call.keywords and name != "dict"):
            return _FUNCTIONS[name](
                *(self._value(argument) for argument in args),
                **{keyword.arg: self._value(keyword.value) for keyword in call.keywords if keyword.arg},
            )
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("get", "update", "pop", "setdefault"):
            table = self._value(call.func.value)
            if isinstance(table, dict) and not call.keywords:
                return getattr(table, call.func.attr)(*(self._value(argument) for argument in args))
        raise NotFollowedError


@dataclass(frozen=True, slots=True)
class _FileText:
    """A file that was opened for reading."""

    text: str
