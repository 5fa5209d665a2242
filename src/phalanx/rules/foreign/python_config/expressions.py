"""Values of expressions, as far as the program determines them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.rules.foreign.python_config.calls import call_value
from phalanx.rules.foreign.python_config.possible_values import (
    MOST_TEXT,
    Built,
    Function,
    Method,
    PythonReference,
    PythonScope,
    UnknownPython,
    is_plain,
    merge_values,
    reason_of,
    truth_of,
)

if TYPE_CHECKING:
    from phalanx.rules.foreign.python_config.evaluator import PythonReader

MOST_ITEMS = 4_096
MOST_NUMBER = 10**30

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], object]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(reader: PythonReader, node: ast.expr, scope: PythonScope | None) -> object:
    """Return the value of an expression."""
    match node:
        case ast.Constant():
            return node.value if is_plain(node.value) else UnknownPython("is not a number or a text")
        case ast.Name():
            return reader.find_name(node.id, scope)
        case ast.Attribute():
            return _attribute(reader, evaluate(reader, node.value, scope), node.attr)
        case ast.Call():
            return _call(reader, node, scope)
        case ast.List() | ast.Tuple() | ast.Set():
            items = _items(reader, node.elts, scope)
            return items if isinstance(items, UnknownPython) or not isinstance(node, ast.Tuple) else tuple(items)
        case ast.Dict():
            return _dictionary(reader, node, scope)
        case ast.BinOp():
            left, right = evaluate(reader, node.left, scope), evaluate(reader, node.right, scope)
            return _binary(node.op, left, right)
        case ast.UnaryOp():
            return _unary(node.op, evaluate(reader, node.operand, scope))
        case ast.BoolOp():
            return _boolean(reader, node, scope)
        case ast.Compare():
            return _comparison(reader, node, scope)
        case ast.IfExp():
            return _choice(reader, node, scope)
        case ast.Subscript():
            return value_at(evaluate(reader, node.value, scope), evaluate(reader, node.slice, scope))
        case ast.JoinedStr():
            return _text(reader, node, scope)
        case ast.Lambda():
            return Function(node=node, module=reader.here[-1].name, scope=scope)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return _comprehension(reader, node, scope)
        case ast.NamedExpr():
            value = evaluate(reader, node.value, scope)
            reader.assign(node.target, value, scope or PythonScope(), 0)
            return value
        case _:
            return UnknownPython(f"is {ast.unparse(node)[:60]}, which is not worked out")


def _attribute(reader: PythonReader, owner: object, name: str) -> object:
    if isinstance(owner, Built):
        return reader.read_attribute(owner, name)
    if isinstance(owner, PythonReference):
        module = reader.package.find_module(owner.name)
        if module is not None and name in module.definitions:
            return reader.module_name(module, name)
        return PythonReference(f"{owner.name}.{name}")
    if isinstance(owner, str | list | dict | tuple | set):
        return Method(owner, name)
    return (
        owner
        if isinstance(owner, UnknownPython)
        else UnknownPython(f"is the attribute {name} of something that is not read")
    )


def _call(reader: PythonReader, node: ast.Call, scope: PythonScope | None) -> object:
    reader.count_step()
    if isinstance(node.func, ast.Attribute):
        owner = evaluate(reader, node.func.value, scope)
        is_method = isinstance(owner, Built) and node.func.attr not in owner.fields
        callee = Method(owner, node.func.attr) if is_method else _attribute(reader, owner, node.func.attr)
    else:
        callee = evaluate(reader, node.func, scope)
    args: list[object] = []
    keywords: dict[str, object] = {}
    lines: dict[str, int] = {}
    open_why = ""
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            unpacked = evaluate(reader, argument.value, scope)
            if isinstance(unpacked, list | tuple):
                args += unpacked
            else:
                open_why = reason_of(unpacked)
        else:
            args.append(evaluate(reader, argument, scope))
    for keyword in node.keywords:
        value = evaluate(reader, keyword.value, scope)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
            lines[keyword.arg] = reader.line_of(keyword.value)
        elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
            keywords |= value
            lines |= dict.fromkeys(value, reader.line_of(keyword.value))
        else:
            open_why = f"may be among **{ast.unparse(keyword.value)[:60]}"
    return call_value(
        reader,
        callee,
        args,
        keywords,
        lines,
        open_why=open_why,
        line=reader.line_of(node),
        text=ast.unparse(node.func)[:80],
    )


def _items(reader: PythonReader, nodes: list[ast.expr], scope: PythonScope | None) -> list[object] | UnknownPython:
    items: list[object] = []
    for item_node in nodes:
        if isinstance(item_node, ast.Starred):
            unpacked = evaluate(reader, item_node.value, scope)
            if not isinstance(unpacked, list | tuple):
                return UnknownPython(reason_of(unpacked))
            items += unpacked
        else:
            items.append(evaluate(reader, item_node, scope))
    return items


def _dictionary(reader: PythonReader, node: ast.Dict, scope: PythonScope | None) -> object:
    entries: dict[object, object] = {}
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        value = evaluate(reader, value_node, scope)
        if key_node is None:
            if not isinstance(value, dict):
                return UnknownPython(reason_of(value))
            entries |= value
            continue
        key = evaluate(reader, key_node, scope)
        if isinstance(key, PythonReference):
            key = key.name
        if not is_plain(key):
            return UnknownPython(reason_of(key))
        entries[key] = value
    return entries


def _binary(op: ast.operator, left: object, right: object) -> object:
    if isinstance(left, list) and isinstance(right, list) and isinstance(op, ast.Add):
        return [*left, *right]
    if isinstance(left, dict) and isinstance(right, dict) and isinstance(op, ast.BitOr):
        return {**left, **right}
    if isinstance(left, str) and isinstance(right, str):
        if isinstance(op, ast.Add) and len(left) + len(right) < MOST_TEXT:
            return left + right
        return UnknownPython("is a text that is not worked out")
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return UnknownPython(reason_of(left, right))
    try:
        if isinstance(op, ast.Pow):
            if isinstance(left, int) and isinstance(right, int) and right >= 0:
                # Bounded, because 10 ** 10 ** 10 would never end.
                return _small_power(left, right)
            return float(left) ** float(right)
        if type(op) not in ARITHMETIC or abs(left) > MOST_NUMBER or abs(right) > MOST_NUMBER:
            return UnknownPython("is arithmetic that is not worked out")
        return ARITHMETIC[type(op)](left, right)
    except (ArithmeticError, ValueError, TypeError):
        return UnknownPython("is arithmetic without a result")


def _small_power(base: int, exponent: int) -> object:
    return (
        base**exponent
        if 0 <= exponent <= 64 and abs(base) <= 10**4
        else UnknownPython("is a power that is not worked out")
    )


def _unary(op: ast.unaryop, value: object) -> object:
    if isinstance(op, ast.Not):
        truth = truth_of(value)
        return UnknownPython(reason_of(value)) if truth is None else not truth
    if isinstance(op, ast.USub | ast.UAdd) and isinstance(value, int | float):
        return -value if isinstance(op, ast.USub) else value
    return UnknownPython(reason_of(value))


def _boolean(reader: PythonReader, node: ast.BoolOp, scope: PythonScope | None) -> object:
    stopping_truth = isinstance(node.op, ast.Or)
    unknown: UnknownPython | None = None
    value: object = None
    for operand in node.values:
        value = evaluate(reader, operand, scope)
        truth = truth_of(value)
        if truth is None:
            unknown = unknown or UnknownPython(f"depends on {ast.unparse(operand)[:80]}")
        elif truth is stopping_truth:
            # `unknown or True` is true, whatever the unknown is; but the value of the expression may differ.
            return value if unknown is None or isinstance(value, bool) else unknown
    return unknown if unknown is not None else value


def _comparison(reader: PythonReader, node: ast.Compare, scope: PythonScope | None) -> object:
    left = evaluate(reader, node.left, scope)
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(reader, right_node, scope)
        result = _compare_two(op, left, right)
        if result is None:
            return UnknownPython(f"depends on {ast.unparse(node)[:80]}")
        if not result:
            return False
        left = right
    return True


def _compare_two(op: ast.cmpop, left: object, right: object) -> bool | None:
    if isinstance(op, ast.Is | ast.Eq | ast.IsNot | ast.NotEq):
        is_same = _is_same(left, right)
        return is_same if is_same is None or isinstance(op, ast.Is | ast.Eq) else not is_same
    if isinstance(op, ast.In | ast.NotIn):
        is_inside = _is_inside(left, right)
        return is_inside if is_inside is None or isinstance(op, ast.In) else not is_inside
    if type(op) in _ORDER and isinstance(left, int | float) and isinstance(right, int | float):
        return bool(_ORDER[type(op)](left, right))
    return None


def _is_same(left: object, right: object) -> bool | None:
    if is_plain(left) and is_plain(right):
        return left == right
    if isinstance(left, PythonReference) and left == right:
        return True
    for side, other_side in ((left, right), (right, left)):
        # An object that is built here is neither None nor a text or number.
        if is_plain(other_side) and (
            isinstance(side, list | dict | tuple | Function) or (isinstance(side, Built) and not side.implied)
        ):
            return False
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and all(map(is_plain, (*left, *right))):
        return list(left) == list(right)
    return None


def _is_inside(left: object, right: object) -> bool | None:
    if isinstance(left, str) and isinstance(right, str):
        return left in right
    if isinstance(right, dict):
        right = list(right)
    if not is_plain(left) or not isinstance(right, list | tuple | set):
        return None
    if any(is_plain(item) and item == left for item in right):
        return True
    return False if all(is_plain(item) for item in right) else None


def _choice(reader: PythonReader, node: ast.IfExp, scope: PythonScope | None) -> object:
    truth = truth_of(evaluate(reader, node.test, scope))
    if truth is not None:
        return evaluate(reader, node.body if truth else node.orelse, scope)
    first, second = evaluate(reader, node.body, scope), evaluate(reader, node.orelse, scope)
    return merge_values(first, second, f"depends on {ast.unparse(node.test)[:80]}")


def value_at(owner: object, key: object) -> object:
    """Return `owner[key]`, or an unknown value."""
    if isinstance(owner, PythonReference):
        # A generic type, such as run.Config[Model]
        return PythonReference(owner.name)
    try:
        if isinstance(owner, dict) and is_plain(key):
            return owner[key] if key in owner else UnknownPython(f"has no key {str(key)[:40]}")
        if isinstance(owner, list | tuple | str) and isinstance(key, int):
            return owner[key]
    except IndexError:
        return UnknownPython("is beyond the end of a list")
    return UnknownPython(reason_of(owner, key))


def _text(reader: PythonReader, node: ast.JoinedStr, scope: PythonScope | None) -> object:
    texts: list[str] = []
    for part in node.values:
        value = (
            evaluate(reader, part.value, scope)
            if isinstance(part, ast.FormattedValue)
            else evaluate(reader, part, scope)
        )
        if not is_plain(value) or (isinstance(part, ast.FormattedValue) and part.format_spec is not None):
            return UnknownPython(reason_of(value))
        texts.append(str(value))
    text = "".join(texts)
    return text if len(text) < MOST_TEXT else UnknownPython("is too long a text")


def _comprehension(
    reader: PythonReader, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: PythonScope | None
) -> object:
    loop = node.generators[0]
    items = evaluate(reader, loop.iter, scope)
    items = list(items) if isinstance(items, list | tuple | dict) else items
    if len(node.generators) > 1 or not isinstance(items, list) or len(items) > MOST_ITEMS:
        return UnknownPython(reason_of(items))
    results: list[object] = []
    pairs: dict[object, object] = {}
    for item in items:
        reader.count_step()
        inner = PythonScope(parent=scope)
        reader.assign(loop.target, item, inner, 0)
        conditions = [truth_of(evaluate(reader, test, inner)) for test in loop.ifs]
        if None in conditions:
            return UnknownPython("is chosen by a condition that is not known")
        if not all(conditions):
            continue
        if isinstance(node, ast.DictComp):
            key = evaluate(reader, node.key, inner)
            if not is_plain(key):
                return UnknownPython(reason_of(key))
            pairs[key] = evaluate(reader, node.value, inner)
        else:
            results.append(evaluate(reader, node.elt, inner))
    return pairs if isinstance(node, ast.DictComp) else results
