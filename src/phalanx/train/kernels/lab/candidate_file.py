"""A candidate's file, read and never run here: which operation it is for, and what it plainly may not do.

The contract of a file:

    OP = "rms-norm"                  # an operation of `phalanx kernels list`
    def kernel(*inputs): ...         # tensors in; a tensor, or a tuple of tensors, in memory of its own

What is found here is found by reading, and is there to name a mistake in plain words. It stops nobody who hides an
import; the process that runs the file does.
"""

from __future__ import annotations

import ast
from pathlib import Path

from phalanx.errors import mistake, nearest
from phalanx.io.files import read_text
from phalanx.train.kernels.kernel_op import KernelOp
from phalanx.train.kernels.lab.candidate_process import ALLOWED_MODULES
from phalanx.train.kernels.lab.candidate_server import RefusedError

MOST_BYTES = 256 * 1024
_RANKS = "a kernel computes the same whatever the rank, and is judged without ranks"
FORBIDDEN_CALLS = ("__import__", "breakpoint", "compile", "eval", "exec", "input", "open")


def read_candidate(path: Path) -> str:
    """The text of a kernel's file; raises UserError where there is none."""
    return read_text(path, noun="kernel file", most_bytes=MOST_BYTES)


def find_op(name: str, known: dict[str, KernelOp], *, where: str = "OP") -> KernelOp:
    """The operation of a name; raises UserError with the nearest."""
    if name in known:
        return known[name]
    close = nearest(name, known)
    listed = f"the operations are {', '.join(known)}" if known else "no operation is known here"
    raise mistake(where, f'there is no operation "{name[:60]}"', fix=f"did you mean {close}?" if close else listed)


def candidate_op(source: str, where: str, given: str | None, known: dict[str, KernelOp]) -> KernelOp:
    """The operation a file is for: `given`, or its OP; raises UserError where neither says or both differ."""
    said = declared_op(source, where)
    if given and said and given != said:
        raise mistake(where, f'is for the operation "{said[:60]}", and --op says {given}', fix="leave --op out")
    if not (given or said):
        raise mistake(where, "does not say which operation it is for", fix='write OP = "…" in it, or give --op')
    return find_op(given or said, known, where="--op" if given else where)


def declared_op(source: str, where: str) -> str:
    """What the file assigns to OP; raises UserError for what is not Python."""
    for node in parse_candidate(source, where).body:
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == "OP" for one in node.targets):
            return (
                node.value.value if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else ""
            )
    return ""


def parse_candidate(source: str, where: str) -> ast.Module:
    """Its syntax tree."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise mistake(f"{where}:{line}" if line else where, f"is not Python: {error}"[:300]) from error


def check_text(tree: ast.Module) -> None:
    """Raise RefusedError for what a kernel may not do, where it can be read off the file."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "kernel" for node in tree.body):
        raise RefusedError("contract", "defines no function kernel")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."] if not node.level else ["."]
        else:
            names = []
        for name in names:
            if name.partition(".")[0] not in ALLOWED_MODULES:
                raise RefusedError("import", f"line {node.lineno}: imports {name}, which a kernel may not")  # type: ignore[attr-defined]
            if name.startswith("torch.distributed"):
                raise RefusedError("forbidden", f"line {node.lineno}: imports {name}: {_RANKS}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute) and node.attr == "distributed":
            raise RefusedError("forbidden", f"line {node.lineno}: asks for torch.distributed: {_RANKS}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            raise RefusedError("forbidden", f"line {node.lineno}: calls {node.func.id}, which a kernel may not")
