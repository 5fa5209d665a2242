"""The third step is compared with the kernels that were selected for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.train.kernels.engine_kernels import StepKernels
from phalanx.train.kernels.model_kernels import LayerKernels
from phalanx.train.kernels.selector import KernelChoice
from phalanx.train.promised_step import PromisedStep


def timed(op: str, time_ms: float, variant: str = "builtin") -> KernelChoice:
    return KernelChoice(op=op, variant=variant, times_ms={variant: time_ms})


HEAD = LayerKernels(choices={"linear-cross-entropy": timed("linear-cross-entropy", 40.0)}, compiled=True)
KERNELS = StepKernels(optimizer=timed("AdamW", 10.0), layers=HEAD, layer=timed("layer", 100.0))


def run(kernels: StepKernels, steps: list[dict]) -> list[dict]:
    """The remarks of a run of two layers and two micro-batches whose steps are these."""
    written: list[dict] = []
    part = SimpleNamespace(model=SimpleNamespace(layers=[0, 1]))
    settings = SimpleNamespace(layout=SimpleNamespace(accumulation=2))
    training = SimpleNamespace(
        step=0,
        engine=SimpleNamespace(kernels=kernels, parts=[part], settings=settings),
        events=SimpleNamespace(write=lambda kind, **fields: written.append({"event": kind, **fields})),
    )
    check = PromisedStep()
    for step in steps:
        training.step += 1
        check.on_step_end(training, SimpleNamespace(**({"data_s": 0.0, "compile_s": None, "samples": ()} | step)))
    return written


def test_a_step_as_promised_is_one_line_at_the_third_step() -> None:
    # 2 layers x 2 micro-batches x 100 ms, 2 x 40 ms of head and loss, 10 ms of optimizer
    remarks = run(KERNELS, [{"duration_s": 9.0}, {"duration_s": 9.0}, {"duration_s": 0.5}, {"duration_s": 9.0}])
    assert remarks == [
        {
            "event": "remark",
            "step": 3,
            "text": "a step takes 500 ms, 2.0 % above the 490 ms that its kernels took when they were selected",
            "is_told": True,
        }
    ]


def test_a_step_by_slower_kernels_is_a_warning_with_the_parts() -> None:
    (remark,) = run(KERNELS, [{"duration_s": 0.65, "data_s": 0.001}] * 3)
    assert remark["is_warning"] is True
    assert remark["text"].startswith("a step takes 649 ms, 32.4 % above the 490 ms that its kernels took")
    assert "(layers 400, head and loss 80, optimizer 10 ms)" in remark["text"]


def test_steps_that_compile_or_are_recorded_are_not_compared() -> None:
    steps = [{"duration_s": 9.0, "compile_s": 3.0}, {"duration_s": 9.0, "samples": (1,)}, *[{"duration_s": 0.49}] * 3]
    assert [remark["step"] for remark in run(KERNELS, steps)] == [5]


def test_the_wait_for_data_is_not_the_kernels() -> None:
    (remark,) = run(KERNELS, [{"duration_s": 2.0, "data_s": 1.51}] * 3)
    assert remark.get("is_told") is True


def test_in_fp8_layer_and_head_are_those_that_were_selected() -> None:
    kernels = StepKernels(
        optimizer=timed("AdamW", 10.0),
        layers=HEAD,
        float8=timed("fp8-layer", 80.0, "fused"),
        float8_head=timed("fp8-head", 20.0, "fp8"),
    )
    promise = kernels.promise(layers=2, micro_batches=2)
    assert promise is not None
    assert promise.total_ms == pytest.approx(2 * 2 * 80 + 2 * 20 + 10)


@pytest.mark.parametrize("missing", ["optimizer", "layers", "layer"])
def test_without_one_of_the_parts_nothing_is_promised(missing: str) -> None:
    from dataclasses import replace

    assert run(replace(KERNELS, **{missing: None}), [{"duration_s": 1.0}] * 4) == []
