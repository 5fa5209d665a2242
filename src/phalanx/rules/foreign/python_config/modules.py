"""The source files of a program: its own, and those of its package that it imports. No other file is opened."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.io.files import read_text
from phalanx.io.path_probes import is_file, is_folder, path_exists, resolve_path
from phalanx.units import KIB

MOST_PYTHON_BYTES = 512 * KIB
MOST_FILES = 200  # opened or searched for by one configuration
MOST_UP = 8  # folders above the file
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(eq=False, slots=True)
class SourceFile:
    """A parsed file: the statement that defines each top-level name, and the values evaluated so far."""

    name: str  # dotted, as in the package; "" for the file that is read
    path: Path
    tree: ast.Module
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # names that the top level computes by other statements
    values: dict[str, object] = field(default_factory=dict)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


class PythonPackage:
    """Finds the modules that a program imports from its own package, or from one next to it or above it."""

    def __init__(self, path: Path) -> None:
        self.main = _parse_file(path, "")
        resolved = resolve_path(path)
        # Folders that may contain a package, the nearest first
        self._folders: list[Path] = []
        for folder in [resolved.parent, *resolved.parent.parents][:MOST_UP]:
            self._folders.append(folder)
            # Folders above the repository do not belong to it
            if path_exists(folder / ".git"):
                break
        self.main.name = self._name_of(resolved)
        self._files: dict[str, SourceFile | None] = {self.main.name: self.main}

    def _name_of(self, path: Path) -> str:
        """Return the dotted name of a file.

        It is relative to a folder with which the file's imports begin, or else to its topmost package.
        """
        imports = [
            candidate
            for candidate in ast.walk(self.main.tree)
            if isinstance(candidate, ast.ImportFrom) and not candidate.level
        ]
        tops = {(candidate.module or "").partition(".")[0] for candidate in imports}
        top = next((candidate for candidate in self._folders if candidate.name in tops), None)
        if top is None:
            packages = [candidate for candidate in self._folders if is_file(candidate / "__init__.py")]
            top = packages[-1] if packages and packages == self._folders[: len(packages)] else path.parent / "x"
        parts = list(path.relative_to(top.parent).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find_module(self, name: str) -> SourceFile | None:
        """Return the file of a module; None if it is not in the package."""
        if name not in self._files:
            self._files[name] = self._open_module(name)
        return self._files[name]

    def _open_module(self, name: str) -> SourceFile | None:
        parts = name.split(".")
        if len(self._files) >= MOST_FILES or not all(_PLAIN_NAME.fullmatch(name_part) for name_part in parts):
            return None
        for folder in self._folders:
            is_sibling = folder == self._folders[0] and is_file(folder / f"{parts[0]}.py")
            if not is_folder(folder / parts[0]) and not is_sibling:
                continue
            base = folder.joinpath(*parts)
            for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
                if is_file(path) and resolve_path(path).is_relative_to(folder):
                    try:
                        return _parse_file(path, name)
                    except UserError:
                        return None
        return None


def absolute_name(source: SourceFile, node: ast.ImportFrom) -> str:
    """Return the module that `from … import` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = source.name.split(".")
    keep = len(parts) - node.level + (1 if source.is_package else 0)
    if keep < 1:  # beyond the top of the package
        return ""
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def parse_python(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which must not be modified; raise UserError if it is not valid Python."""
    try:
        status = path.stat()
        return _parsed(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return _parsed(path, 0, 0)


@lru_cache(maxsize=64)  # recipes of one folder import the same modules
def _parsed(path: Path, modified_ns: int, size: int) -> ast.Module:
    text = read_text(path, noun="configuration")
    if len(text) > MOST_PYTHON_BYTES:
        raise mistake(str(path), f"is larger than {MOST_PYTHON_BYTES // KIB} KiB", why="no training configuration is")
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise mistake(f"{path}:{error.lineno or 0}", f"is not Python: {str(error.msg)[:120]}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise mistake(str(path), f"is not Python that can be read: {str(error)[:120]}") from error


def _parse_file(path: Path, name: str) -> SourceFile:
    source = SourceFile(name=name, path=path, tree=parse_python(path))
    for node in _top_statements(source.tree.body):
        for defined_name in _defined_names(node):
            if defined_name in source.definitions and not isinstance(node, ast.ImportFrom | ast.Import | ast.Assign):
                source.changed.add(defined_name)
            source.definitions[defined_name] = node
        if isinstance(node, ast.AugAssign | ast.For | ast.While | ast.With | ast.If):
            source.changed |= {
                defined_name.id
                for defined_name in ast.walk(node)
                if isinstance(defined_name, ast.Name) and isinstance(defined_name.ctx, ast.Store)
            }
    return source


def _top_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield top-level statements, including those inside `try` and `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, ast.Try):
            yield from _top_statements([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)[:80]:
            yield from _top_statements(node.body)
        else:
            yield node


def _defined_names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Assign():
            return [
                name_node.id
                for target in node.targets
                for name_node in ast.walk(target)
                if isinstance(name_node, ast.Name)
            ]
        case ast.AnnAssign(target=ast.Name(id=name)) if node.value is not None:
            return [name]
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.Import():
            return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        case _:
            return []
