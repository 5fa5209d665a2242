"""Templates of `phalanx kernels new`: of every operation they compute what it asks for, and results that are codes are
judged by the numbers they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from phalanx.errors import UserError
from phalanx.train.kernels.kernel_op import KernelOp
from phalanx.train.kernels.lab.candidate_guard import judge_candidate
from phalanx.train.kernels.lab.candidate_server import CandidateLimits, CandidateServer
from phalanx.train.kernels.lab.error_rules import compare_values, find_truth, result_kinds
from phalanx.train.kernels.lab.new_kernel import template_files
from phalanx.train.kernels.lab.skill_eval import task_prompt
from phalanx.train.kernels.lab.trial_inputs import ORDINARY, WIDE, KernelCase, draw_inputs
from phalanx.train.kernels.operations import load_all
from phalanx.train.kernels.source_module import load_source

OPS = load_all()
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", OPS)
def test_a_template_computes_its_operation(name: str) -> None:
    op = OPS[name]
    files = template_files(op)
    kernel = load_source("template", files["kernel.py"]).kernel
    for number, shape in enumerate(op.odd_shapes):
        case = KernelCase(shape=shape, dtype=op.dtypes[0], seed=number, pattern=WIDE if number % 2 else ORDINARY)
        inputs = draw_inputs(op, case, CPU)
        results = kernel(*inputs)
        kinds = [(one.dtype, tuple(one.shape)) for one in results]
        assert kinds == result_kinds(op, inputs)
        assert compare_values(op.decoded(results, inputs), find_truth(op, inputs, case.dtype), str(case)) <= 1.0
    definitions = [line for line in files["kernel.py"].splitlines() if line.startswith(("def ", "LR, "))]
    assert len(definitions) == len(set(definitions))


@pytest.mark.parametrize("name", OPS)
def test_a_prompt_holds_the_code_that_is_asked_for(name: str) -> None:
    code = task_prompt(OPS[name], with_skill=False).split("```python\n")[1].split("```")[0]
    assert "def " in code
    compile(code, name, "exec")


def test_a_reference_without_a_text_is_no_template() -> None:
    op = replace(OPS["rms-norm"], reference=lambda x, weight: (x * weight,))
    with pytest.raises(UserError, match="rms-norm: its reference has no text that a template could start from"):
        template_files(op)


# ---- results that are codes ------------------------------------------------------------------------------------------


def coded(op: KernelOp) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    inputs = op.make_inputs(op.odd_shapes[1], op.dtypes[0], CPU, 0)
    return inputs, op.plain(*inputs)


@pytest.mark.parametrize(("name", "nothing"), [("int8-blocks", -128), ("int4-blocks", 0)])
def test_codes_that_stand_for_nothing_are_not_numbers(name: str, nothing: int) -> None:
    op = OPS[name]
    inputs, (scales, codes) = coded(op)
    assert not op.decoded((scales, codes), inputs)[0].isnan().any()
    wrong = codes.clone()
    wrong[5] = nothing
    assert op.decoded((scales, wrong), inputs)[0].isnan().sum() == (1 if name == "int8-blocks" else 2)
    assert op.decoded((-scales, codes), inputs)[0].isnan().any()
    if name == "int4-blocks":  # 129 values: half a byte is left over
        codes[-1] |= 0x10
        assert op.decoded((scales, codes), inputs)[0].isnan().any()


@pytest.fixture(scope="module")
def server() -> Iterator[CandidateServer]:
    with CandidateServer() as server:
        yield server


HEAD = 'import torch\n\nOP = "{name}"\n\n\ndef kernel(x):\n    '
NOT_ENCODED = {
    "int8-blocks": "return x.clone(), x.to(torch.int8)",
    "float8-rows": "return x.clone(), x.clone()",
}
ROUNDED_TOWARDS_ZERO = {
    "int8-blocks": """table = torch.nn.functional.pad(x, (0, -x.numel() % 256)).view(-1, 256)
    scale = table.abs().amax(1) / 127
    return scale, (table / scale.clamp(min=1e-30)[:, None]).to(torch.int8).view(-1)[: x.numel()].clone()""",
    "float8-rows": """scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 224
    rows = (x.float() / scale).to(torch.float8_e4m3fn)
    whole = scale.amax()
    turned = (x.t().float() / whole).to(torch.float8_e5m2).to(torch.float32).to(torch.float8_e4m3fn)
    return rows, scale, turned.contiguous(), whole""",
}


@pytest.mark.parametrize("name", NOT_ENCODED)
def test_who_does_not_encode_or_rounds_badly_is_refused(name: str, server: CandidateServer) -> None:
    found = {}
    for what, body in (("plain", NOT_ENCODED[name]), ("coarse", ROUNDED_TOWARDS_ZERO[name])):
        text = HEAD.format(name=name) + body + "\n"
        found[what] = judge_candidate(
            text, OPS[name], server=server, device="cpu", timed=False, limits=CandidateLimits()
        )
    assert [(one.passed, one.kind) for one in found.values()] == [(False, "result"), (False, "values")]
    own = template_files(OPS[name])["kernel.py"]
    verdict = judge_candidate(own, OPS[name], server=server, device="cpu", timed=False, limits=CandidateLimits())
    assert verdict.passed, verdict.reason


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_a_kernel_for_machines_with_triton_alone_is_told_so(server: CandidateServer) -> None:
    text = HEAD.format(name="swiglu").replace("import torch", "import torch\nimport triton") + "return x\n"
    verdict = judge_candidate(text, OPS["swiglu"], server=server, device="cpu", timed=False, limits=CandidateLimits())
    assert (verdict.kind, verdict.reason) == ("import", "imports triton, which this machine does not have")
