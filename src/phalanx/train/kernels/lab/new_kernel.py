"""`phalanx kernels new`: the files of a new kernel, a template that passes the guard as it is.

The template computes the operation's reference in float32; where results are codes of numbers (fp8 rows and their
scales), it makes them by plain operations. The user replaces its body with a kernel.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType

import torch

from phalanx.errors import mistake
from phalanx.train.kernels.kernel_op import KernelOp
from phalanx.train.kernels.lab.candidate_process import ALLOWED_MODULES
from phalanx.train.kernels.lab.error_rules import result_kinds

_KERNEL = '''"""A kernel for {name}: {summary}.

Verify it with `phalanx kernels verify kernel.py --allow-code`. It passes as it is: it computes the reference in
float32. Put your own kernel in its place, one step at a time. A Triton kernel runs on a GPU; keep the plain
path for the CPU.

Inputs: {inputs}.
Results: {results}, in memory of their own, contiguous.{gradients}
"""

{imports}

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = tl = None

OP = "{name}"
# Of each result: a type, or None for that of the inputs.
RESULT_DTYPES = ({dtypes},)


{reference}

def kernel(*inputs):
    wide = [one.float() if one.is_floating_point() else one for one in inputs]
    given = next(one.dtype for one in inputs if one.is_floating_point())
    results = {function}(*wide)
    return tuple(
        one.to(dtype or given).contiguous() for one, dtype in zip(results, RESULT_DTYPES, strict=True)
    )
'''
_TEST = '''"""`pytest {file}`: the kernel beside this file passes the guard, on the GPU where there is one."""

from pathlib import Path

import phalanx

KERNEL = Path(__file__).parent / "kernel.py"


def test_kernel_passes_the_guard():
    verdict = phalanx.kernels.verify(KERNEL, allow_code=True)
    assert verdict.passed, verdict.reason
'''
_BENCH = '''"""`python {file}`: the kernel's time by the guard, beside the variants that Phalanx has of {name}."""

from pathlib import Path

import phalanx

print(phalanx.kernels.verify(Path(__file__).parent / "kernel.py", allow_code=True))
print(phalanx.kernels.bench("{name}", compiled=False))
'''


def template_files(op: KernelOp) -> Mapping[str, str]:
    """Return file name -> text: kernel, reference, test and benchmark."""
    imports, reference, function = reference_text(op)
    inputs = op.make_inputs(op.odd_shapes[0], op.dtypes[0], torch.device("cpu"), 0)
    kinds = {
        dtype: result_kinds(op, op.make_inputs(op.odd_shapes[0], dtype, torch.device("cpu"), 0)) for dtype in op.dtypes
    }
    fixed = [
        None if all(dtype == kinds[dtype][place][0] for dtype in op.dtypes) else result_dtype
        for place, (result_dtype, _) in enumerate(kinds[op.dtypes[0]])
    ]
    with_grad = f"\nGradients are asked of inputs {', '.join(map(str, op.gradients))}." if op.gradients else ""
    text = _KERNEL.format(
        name=op.name,
        summary=op.summary.rstrip("."),
        inputs=", ".join(_shown_tensor(tensor) for tensor in inputs),
        results=", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in kinds[op.dtypes[0]]),
        gradients=with_grad,
        imports=imports,
        dtypes=", ".join(str(dtype) for dtype in fixed),
        reference=reference,
        function=function,
    )
    return {
        "kernel.py": text,
        "reference.py": f'"""The reference of {op.name}, the truth in float64."""\n\n{imports}\n\n\n{reference}',
        "test_kernel.py": _TEST.format(file="test_kernel.py"),
        "bench_kernel.py": _BENCH.format(file="bench_kernel.py", name=op.name),
    }


def _shown_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def reference_text(op: KernelOp) -> tuple[str, str, str]:
    """Return the imports, the source and the name of an operation's plain code, independent of Phalanx.

    The source includes every definition of its modules that it uses.
    """
    # ast.unparse keeps docstrings and drops comments. The text is part of the recorded prompts of
    # benchmarks/data/kernel_skill_answers_2026-11-18.jsonl, so a new word in a reference ends their replay.
    function = inspect.unwrap(op.plain)
    module = inspect.getmodule(function)
    name = getattr(function, "__name__", "")
    imports: dict[str, None] = {"import torch": None}
    parts: dict[str, str] = {}
    if module is not None:
        _collect(name, module, imports, parts, op.name)
    if name not in parts:
        raise mistake(op.name, "its reference has no text that a template could start from")
    return "\n".join(sorted(imports)), "\n\n".join(f"{definition}\n" for definition in parts.values()), name


def _collect(name: str, module: ModuleType, imports: dict[str, None], parts: dict[str, str], op: str) -> None:
    """Add the definition of a name to `parts`, after the definitions that it uses."""
    if name in parts:
        return
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        raise mistake(op, "its reference has no text that a template could start from") from None
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    _collect_import(node, alias, module, imports, parts, op)
                    return
    for node in tree.body:
        if name in (names := _defined_names(node)):
            if any(defined_name in parts for defined_name in names):
                return  # one assignment defines several names
            parts[name] = ""  # a function may call itself
            for used in ast.walk(_without_hints(ast.parse(ast.unparse(node)))):
                if isinstance(used, ast.Name) and used.id != name and hasattr(module, used.id):
                    _collect(used.id, module, imports, parts, op)
            text = parts.pop(name) or ast.unparse(_without_hints(ast.parse(ast.unparse(node))))
            parts[name] = text
            return


def _collect_import(
    node: ast.Import | ast.ImportFrom,
    alias: ast.alias,
    module: ModuleType,
    imports: dict[str, None],
    parts: dict[str, str],
    op: str,
) -> None:
    """Add an allowed import to `imports`, or the definition of a name imported from Phalanx to `parts`."""
    top = (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]
    renamed = f" as {alias.asname}" if alias.asname else ""
    if top in ALLOWED_MODULES:
        head = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
        imports[f"{head} {alias.name}{renamed}"] = None
    elif top == "phalanx" and isinstance(node, ast.ImportFrom) and not alias.asname:
        _collect(alias.name, importlib.import_module(str(node.module)), imports, parts, op)
    else:
        raise mistake(op, f"its reference uses {top}, which a kernel may not", fix=f"see {module.__name__}")


def _defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [child.id for target in node.targets for child in ast.walk(target) if isinstance(child, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _without_hints(tree: ast.Module) -> ast.Module:
    """Remove type hints and decorators, which would need imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            node.decorator_list = []
            for argument in (
                *node.args.args,
                *node.args.kwonlyargs,
                *node.args.posonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ):
                if argument is not None:
                    argument.annotation = None
    body = [
        ast.Assign(targets=[statement.target], value=statement.value, lineno=statement.lineno)
        if isinstance(statement, ast.AnnAssign) and statement.value is not None
        else statement
        for statement in tree.body
    ]
    return ast.fix_missing_locations(ast.Module(body=list(body), type_ignores=[]))
