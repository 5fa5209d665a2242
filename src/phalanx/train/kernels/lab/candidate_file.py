"""A candidate's file, parsed but never run here: its operation, and obvious violations of the contract.

The contract of a file:

    OP = "rms-norm"                  # an operation of `phalanx kernels list`
    def kernel(*inputs): ...         # tensors in; a tensor, or a tuple of tensors, in new memory

These checks only read the source, to report a mistake in plain words. They do not stop an author who hides an import;
the process that runs the file does.
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
    """Return the source in a kernel file; raise UserError if it cannot be read."""
    return read_text(path, noun="kernel file", most_bytes=MOST_BYTES)


def find_op(name: str, known: dict[str, KernelOp], *, where: str = "OP") -> KernelOp:
    """Return the operation with a name; raise UserError with the nearest name."""
    if name in known:
        return known[name]
    close = nearest(name, known)
    listed = f"the operations are {', '.join(known)}" if known else "no operation is known here"
    raise mistake(where, f'there is no operation "{name[:60]}"', fix=f"did you mean {close}?" if close else listed)


def candidate_op(source: str, where: str, given: str | None, known: dict[str, KernelOp]) -> KernelOp:
    """Return the operation of a file: `given`, or its OP; raise UserError if both are missing or they differ."""
    declared = declared_op(source, where)
    if given and declared and given != declared:
        raise mistake(where, f'is for the operation "{declared[:60]}", and --op says {given}', fix="leave --op out")
    if not (given or declared):
        raise mistake(where, "does not say which operation it is for", fix='write OP = "…" in it, or give --op')
    return find_op(given or declared, known, where="--op" if given else where)


def declared_op(source: str, where: str) -> str:
    """Return the text that the file assigns to OP, or an empty text; raise UserError if the file is not Python."""
    for node in parse_candidate(source, where).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "OP" for target in node.targets
        ):
            return (
                node.value.value if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else ""
            )
    return ""


def parse_candidate(source: str, where: str) -> ast.Module:
    """Return the syntax tree; raise UserError if the source is not Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise mistake(f"{where}:{line}" if line else where, f"is not Python: {error}"[:300]) from error


def check_text(tree: ast.Module) -> None:
    """Raise RefusedError for violations that are visible in the source."""
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
