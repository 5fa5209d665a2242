"""Check the code that a job names without running it: the file exists, is Python, and defines the name.

The ranks would find these mistakes too, but only after planning, preparing the data and starting every process.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from phalanx.errors import nearest
from phalanx.io.files import open_regular
from phalanx.io.packages import offered_points
from phalanx.io.path_probes import is_folder, path_exists, resolve_path

# A module that uses one of these may define names that its source does not show.
MAKE_NAMES = ("globals", "vars", "exec", "setattr")
LONGEST_SOURCE = 4 << 20  # bytes; longer files are not checked


def missing_code(name: str, folder: Path) -> tuple[str, str] | None:
    """Return the problem with "file.py:name", "package.module:name" or "file.py", and its fix; None if none is found.

    Of a package only the top-level name is looked up, since looking further would run its code.
    """
    place, _, attribute = name.partition(":")
    if not place.endswith(".py"):
        top = place.partition(".")[0]
        if top.isidentifier() and _is_installed(top):
            return None
        return f"no package {top} is installed here", "install it where the ranks run, or write file.py:name"
    path = folder / place
    try:
        with open_regular(path, follow_links=True) as file:
            source = file.read(LONGEST_SOURCE + 1)
    except (OSError, ValueError) as error:
        file_exists = not isinstance(error, FileNotFoundError)
        message = f"{path} cannot be read: {error}" if file_exists else f"there is no file {path}"
        return message, "name a file relative to the job file"
    if len(source) > LONGEST_SOURCE:
        return None
    try:
        body = ast.parse(source, filename=str(path)).body
        bound = set(_bound_names(body))
    except SyntaxError as error:
        return f"{path}:{error.lineno or 1}: is not Python: {error.msg}", "mend that line"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{path} is not Python: {error}", "name a file of Python source"
    if missing := _missing_import(body, resolve_path(path).parent):
        line, top = missing
        return (
            f"{path}:{line}: imports {top}, which is neither installed here nor beside it",
            f"put {top}.py there, or install {top} where the ranks run",
        )
    first = attribute.partition(".")[0]
    if not first or first in bound or "*" in bound or "__getattr__" in bound:
        return None
    close = nearest(first, bound)
    return f"{path} has no {first}", f"did you mean {close}?" if close else f"define {first} in it"


def missing_entry_point(name: str, group: str) -> tuple[str, str] | None:
    """Return a problem and its fix if no installed package offers `name` in a group of entry points; None otherwise."""

    offered = {point.name for point in offered_points(group)}
    if name in offered:
        return None
    close = nearest(name, offered)
    return (
        f"no installed package offers {name!r} as an entry point of {group}",
        f"did you mean {close}?" if close else 'for a file write "file.py:name"',
    )


def _missing_import(body: Iterable[ast.stmt], folder: Path) -> tuple[int, str] | None:
    """Return line and package of the first import that must fail, among those at the beginning of the file.

    An import inside `try` or `if` may be allowed to fail, and any other statement before an import may change the
    search path.
    """
    for statement in body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [statement.module]
        elif isinstance(statement, ast.ImportFrom) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)  # the docstring
        ):
            continue
        else:
            return None
        for top in (name.partition(".")[0] for name in names):
            beside = path_exists(folder / f"{top}.py") or is_folder(folder / top)
            if not (beside or top == "torch" or _is_installed(top)):  # training checks torch itself
                return statement.lineno, top
    return None


def _is_installed(top: str) -> bool:
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module may have after these statements, on any path; "*" if it may have any name."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Global):
                yield from node.names
            elif isinstance(node, ast.Name) and node.id in MAKE_NAMES:
                yield "*"
            elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                yield node.name
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif node is not statement and isinstance(node, ast.stmt):
                yield from _bound_names([node])
