"""Evaluator of the statements of a configuration program, without running any of it.

At an undecided condition both branches are followed: values on which they agree are kept, all others become
`UnknownPython` with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.rules.foreign.python_config.expressions import evaluate
from phalanx.rules.foreign.python_config.modules import PythonPackage, SourceFile, absolute_name
from phalanx.rules.foreign.python_config.possible_values import (
    MISSING,
    Built,
    Function,
    Journal,
    PythonReference,
    PythonScope,
    UnknownPython,
    merge_values,
    truth_of,
)

MOST_STEPS = 60_000  # statements and calls; the largest recipe of 2026 takes 3,000
MOST_CALLS = 24  # nesting of calls
MOST_TURNS = 256  # iterations of a loop


class TooMuch(Exception):
    """A program that takes more steps than any configuration."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A function ended with this value."""

    value: object


ENDED = "ended"  # raise, break or continue: no statement after it is reached


class PythonReader:
    """Evaluates one program; `given` are values for arguments that only the caller knows."""

    def __init__(self, package: PythonPackage, given: Mapping[str, object]) -> None:
        self.package = package
        self.given = given
        self.journal = Journal()
        self.steps = 0
        self.depth = 0
        self.here: list[SourceFile] = [package.main]

    # ---- names -------------------------------------------------------------------------------------------------------

    def count_step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooMuch

    def line_of(self, node: ast.AST) -> int:
        """Return a node's line in the main file; 0 in any other file."""
        return getattr(node, "lineno", 0) if self.here[-1] is self.package.main else 0

    def find_name(self, name: str, scope: PythonScope | None) -> object:
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return self.module_name(self.here[-1], name)

    def module_name(self, source: SourceFile, name: str) -> object:
        """Return a name of a file's top level, evaluated at first use."""
        if name in source.values:
            return source.values[name]
        node = source.definitions.get(name)
        if node is None:
            return PythonReference(name) if source is self.here[-1] else PythonReference(f"{source.name}.{name}")
        if name in source.changed:
            return UnknownPython(f"is computed where {source.path.name} is loaded")
        source.values[name] = UnknownPython("is defined by itself")
        self.here.append(source)
        try:
            source.values[name] = self._define(source, name, node)
        finally:
            self.here.pop()
        return source.values[name]

    def _define(self, source: SourceFile, name: str, node: ast.stmt) -> object:
        match node:
            case ast.FunctionDef():
                return Function(node=node, module=source.name)
            case ast.ClassDef() | ast.AsyncFunctionDef():
                return PythonReference(f"{source.name}.{name}")
            case ast.ImportFrom():
                alias = next(
                    imported_name
                    for imported_name in node.names
                    if (imported_name.asname or imported_name.name) == name
                )
                return self.imported(absolute_name(source, node), alias.name)
            case ast.Import():
                alias = next(
                    imported_name
                    for imported_name in node.names
                    if (imported_name.asname or imported_name.name.partition(".")[0]) == name
                )
                return PythonReference(alias.name if alias.asname else name)
            case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()):
                assert node.value is not None
                return evaluate(self, node.value, None)
            case ast.Assign():
                scope = PythonScope()
                self._run_statement(node, scope)
                return scope.names.get(name, UnknownPython("is not worked out"))
            case _:
                return UnknownPython("is not worked out")

    def imported(self, module: str, name: str) -> object:
        """Return the value of `from module import name`, followed within the package."""
        outside = PythonReference(f"{module}.{name}")
        if outside.is_class and not module.startswith("."):
            return outside  # of a class only the name is used
        source = self.package.find_module(module)
        node = source.definitions.get(name) if source is not None else None
        if isinstance(node, ast.ImportFrom) and source is not None and absolute_name(source, node) == module:
            # A re-export in the package itself
            return outside
        if source is not None and node is not None and len(self.here) < MOST_CALLS:
            return self.module_name(source, name)
        return outside

    # ---- functions ---------------------------------------------------------------------------------------------------

    def call_function(
        self, function: Function, args: Sequence[object], keywords: Mapping[str, object], *, whole: bool = True
    ) -> object:
        """Return the result of a function; `whole` is false if some of its arguments are not known."""
        self.count_step()
        if self.depth >= MOST_CALLS:
            return UnknownPython("calls itself too deeply")
        source = self.package.find_module(function.module) or self.package.main
        scope = PythonScope(parent=function.scope)
        self.depth += 1
        self.here.append(source)
        try:
            self._bind(function, args, keywords, scope, whole)
            if isinstance(function.node, ast.Lambda):
                return evaluate(self, function.node.body, scope)
            outcome = self.run_block(function.node.body, scope)
        finally:
            self.here.pop()
            self.depth -= 1
        if isinstance(outcome, Returned):
            return outcome.value
        return None if outcome is None else UnknownPython("ends without a value")

    def _bind(
        self,
        function: Function,
        args: Sequence[object],
        keywords: Mapping[str, object],
        scope: PythonScope,
        whole: bool,
    ) -> None:
        spec = function.node.args
        names = [parameter.arg for parameter in (*spec.posonlyargs, *spec.args)]
        defaults = dict(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True))
        defaults |= {
            parameter.arg: default
            for parameter, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
            if default
        }
        positional = dict(zip(names, args, strict=False))
        extra = {
            name: value
            for name, value in keywords.items()
            if name not in (*names, *(parameter.arg for parameter in spec.kwonlyargs))
        }
        for name in (*names, *(parameter.arg for parameter in spec.kwonlyargs)):
            if name in positional:
                value = positional[name]
            elif name in keywords:
                value = keywords[name]
            elif not whole:
                value = UnknownPython(f"is the argument {name}, which is not known")
            elif name in defaults:
                value = evaluate(self, defaults[name], function.scope)
            else:
                value = UnknownPython(f"is the argument {name} of a function that nobody calls here")
            scope.names[name] = value
        if spec.vararg is not None:
            scope.names[spec.vararg.arg] = list(args[len(names) :]) if whole else UnknownPython("are arguments")
        if spec.kwarg is not None:
            scope.names[spec.kwarg.arg] = dict(extra) if whole else UnknownPython("are arguments")

    # ---- statements --------------------------------------------------------------------------------------------------

    def run_block(self, body: Sequence[ast.stmt], scope: PythonScope) -> object:
        """Run statements; return None at the end of the block, else how it was left."""
        for index, node in enumerate(body):
            self.count_step()
            if isinstance(node, ast.If):
                condition = truth_of(evaluate(self, node.test, scope))
                if condition is None:
                    may_leave = any(
                        isinstance(inner_node, ast.Return | ast.Break | ast.Continue) for inner_node in ast.walk(node)
                    )
                    remaining = body[index + 1 :] if may_leave else []
                    outcome = self._both_ways([*node.body, *remaining], [*node.orelse, *remaining], node, scope)
                    if may_leave or outcome is not None:
                        return outcome
                    continue
                outcome = self.run_block(node.body if condition else node.orelse, scope)
            else:
                outcome = self._run_statement(node, scope)
            if outcome is not None:
                return outcome
        return None

    def _both_ways(
        self, first: Sequence[ast.stmt], second: Sequence[ast.stmt], node: ast.If, scope: PythonScope
    ) -> object:
        reason = f"depends on {ast.unparse(node.test)[:80]}"
        first_outcome, first_changes = self.journal.try_way(lambda: self.run_block(first, scope))
        second_outcome, second_changes = self.journal.try_way(lambda: self.run_block(second, scope))
        # A branch that ends in an error is ignored
        if first_outcome == ENDED and second_outcome != ENDED:
            self.journal.apply_changes(second_changes)
            return second_outcome
        if second_outcome == ENDED and first_outcome != ENDED:
            self.journal.apply_changes(first_changes)
            return first_outcome
        self.journal.apply_both(first_changes, second_changes, reason)
        if isinstance(first_outcome, Returned) and isinstance(second_outcome, Returned):
            return Returned(merge_values(first_outcome.value, second_outcome.value, reason))
        return first_outcome if first_outcome == second_outcome else Returned(UnknownPython(reason))

    def _run_statement(self, node: ast.stmt, scope: PythonScope) -> object:
        match node:
            case ast.Return():
                return Returned(None if node.value is None else evaluate(self, node.value, scope))
            case ast.Raise() | ast.Break() | ast.Continue():
                return ENDED
            case ast.Assign():
                value = evaluate(self, node.value, scope)
                for target in node.targets:
                    self.assign(target, value, scope, self.line_of(node.value))
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, evaluate(self, node.value, scope), scope, self.line_of(node.value))
            case ast.AugAssign():
                load = ast.BinOp(left=_as_load(node.target), op=node.op, right=node.value)
                self.assign(
                    node.target, evaluate(self, ast.copy_location(load, node), scope), scope, self.line_of(node)
                )
            case ast.Expr():
                evaluate(self, node.value, scope)
            case ast.FunctionDef():
                self.journal.write(scope.names, node.name, Function(node=node, module=self.here[-1].name, scope=scope))  # type: ignore[arg-type]
            case ast.ImportFrom():
                for alias in node.names:
                    value = self.imported(absolute_name(self.here[-1], node), alias.name)
                    self.journal.write(scope.names, alias.asname or alias.name, value)  # type: ignore[arg-type]
            case ast.Import():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.journal.write(scope.names, name, PythonReference(alias.name if alias.asname else name))  # type: ignore[arg-type]
            case ast.With():
                for item in node.items:
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, UnknownPython("is opened by a with statement"), scope, 0)
                return self.run_block(node.body, scope)
            case ast.Try():
                return self.run_block([*node.body, *node.orelse, *node.finalbody], scope)
            case ast.For():
                return self._run_loop(node, scope)
            case ast.While() | ast.Match():
                self._forget_changes(node, scope)
            case _:
                pass
        return None

    def _run_loop(self, node: ast.For, scope: PythonScope) -> object:
        items = evaluate(self, node.iter, scope)
        items = list(items) if isinstance(items, list | tuple | dict | set | range) else items
        may_leave = any(isinstance(inner_node, ast.Break | ast.Continue | ast.Return) for inner_node in ast.walk(node))
        if not isinstance(items, list) or len(items) > MOST_TURNS or may_leave:
            self._forget_changes(node, scope)
            return None
        for item in items:
            self.assign(node.target, item, scope, self.line_of(node))
            outcome = self.run_block(node.body, scope)
            if outcome is not None:
                return outcome
        return None

    def _forget_changes(self, node: ast.For | ast.While | ast.Match, scope: PythonScope) -> None:
        """Mark variables that a loop changes, and that cannot be followed, as unknown."""
        reason = f"is changed in a loop ({ast.unparse(node).splitlines()[0][:60]})"
        bodies = [case.body for case in node.cases] if isinstance(node, ast.Match) else [[*node.body, *node.orelse]]
        for body in bodies:
            if isinstance(node, ast.For):
                self.assign(node.target, UnknownPython(reason), scope, 0)
            _, changes = self.journal.try_way(lambda body=body: self.run_block(body, scope))  # type: ignore[misc]
            for container, key, _, _ in changes.values():
                if isinstance(container, list):
                    self.journal.replace_list(container, [UnknownPython(reason)])
                else:
                    self.journal.write(container, key, UnknownPython(reason))

    def assign(self, target: ast.expr, value: object, scope: PythonScope, line: int) -> None:
        """Assign a value to a name, an attribute or an element."""
        match target:
            case ast.Name():
                self.journal.write(scope.names, target.id, value)  # type: ignore[arg-type]
            case ast.Attribute():
                owner = evaluate(self, target.value, scope)
                if isinstance(owner, UnknownPython) and isinstance(target.value, ast.Name | ast.Attribute):
                    # A field that is set on it is known, whatever the object was before.
                    owner = Built(kind="", opened=owner.why)
                    self.assign(target.value, owner, scope, line)
                if isinstance(owner, Built):
                    self.journal.write(owner.fields, target.attr, value)  # type: ignore[arg-type]
                    self.journal.write(owner.lines, target.attr, line)  # type: ignore[arg-type]
            case ast.Subscript():
                owner, key = evaluate(self, target.value, scope), evaluate(self, target.slice, scope)
                if isinstance(owner, dict) and isinstance(key, str | int):
                    self.journal.write(owner, key, value)
                elif isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
                    items = list(owner)
                    items[key] = value
                    self.journal.replace_list(owner, items)
                else:
                    self.open_value(owner, "an element that is not known was set")
            case ast.Tuple() | ast.List():
                items_of_value = list(value) if isinstance(value, list | tuple) else []
                has_fitting_length = len(items_of_value) == len(target.elts) and not any(
                    isinstance(target_element, ast.Starred) for target_element in target.elts
                )
                for index, element in enumerate(target.elts):
                    element_value = (
                        items_of_value[index]
                        if has_fitting_length
                        else value
                        if isinstance(value, UnknownPython)
                        else UnknownPython("is one of several")
                    )
                    self.assign(element, element_value, scope, line)
            case ast.Starred():
                self.assign(target.value, UnknownPython("is the rest of a list"), scope, line)

    def open_value(self, value: object, why: str, depth: int = 0) -> None:
        """Mark all parts of an object as unknown, because code that is not read may have changed them."""
        if depth > 12:
            return
        if isinstance(value, Built):
            for name, inner in list(value.fields.items()):
                if isinstance(inner, Built):
                    self.open_value(inner, why, depth + 1)
                else:
                    self.journal.write(value.fields, name, UnknownPython(why))  # type: ignore[arg-type]
            value.opened = value.opened or why
        elif isinstance(value, list):
            self.journal.replace_list(value, [UnknownPython(why)])
        elif isinstance(value, dict):
            for key in list(value):
                self.journal.write(value, key, UnknownPython(why))

    def read_attribute(self, owner: Built, name: str) -> object:
        """Return a field; one that was not set becomes an implied default object, which may be changed further."""
        value = owner.fields.get(name, MISSING)
        if value is not MISSING:
            return value
        if owner.opened:
            return UnknownPython(owner.opened)
        default = Built(kind="", implied=True)
        self.journal.write(owner.fields, name, default)  # type: ignore[arg-type]
        return default


def _as_load(target: ast.expr) -> ast.expr:
    copied = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(copied, target)
