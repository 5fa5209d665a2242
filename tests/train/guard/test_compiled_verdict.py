"""The verdict on compiled code, from the numbers of two passes: what passes, what is unclear, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.train.guard import compiled
from phalanx.train.guard.compiled import (
    CompiledComparison,
    TrialPass,
    compare_compiled,
    compiled_refusal,
    event_fields,
    is_comparison_due,
    rounding_bound,
)

BOUND = rounding_bound("fp32", 1)
# A gradient counts as lost from an eighth of the bound on.
SMALL, LARGE = BOUND * 0.12, BOUND * 0.13
CPU = torch.device("cpu")


def trial_pass(
    norms: Sequence[float], *, loss: float = 8.0, valid: float = 4.0, random: Sequence[int] = (1, 2)
) -> TrialPass:
    return TrialPass(
        loss_sum=torch.tensor(loss, dtype=torch.float64),
        valid=torch.tensor(valid, dtype=torch.float64),
        norms_P=torch.tensor(norms, dtype=torch.float64),
        random=torch.tensor(random, dtype=torch.uint8),
    )


def make_engine(
    *passes: TrialPass, owners: Sequence[bool] = (), compute: str = "fp32", world: int = 1, on_gpu: bool = False
) -> Any:
    """An engine whose passes return these numbers."""
    number = len(passes[0].norms_P) if passes else 0
    shards = [SimpleNamespace(name=f"t{i}", owner=owner) for i, owner in enumerate(owners or [True] * number)]
    results = iter(passes)
    return SimpleNamespace(
        shards=shards,
        dims=SimpleNamespace(world=world, context=2, tensor=4),
        settings=SimpleNamespace(compute=compute, compile=True),
        shape=SimpleNamespace(layers=1, vocab=1000),
        device=SimpleNamespace(type="cuda") if on_gpu else CPU,
        outline=None,
        parts=[],
        trial_pass=lambda tokens, targets: next(results),
    )


def compare(engine: Any) -> CompiledComparison:
    found = compare_compiled(engine, torch.zeros(1, 2), torch.zeros(1, 2))
    assert isinstance(found, CompiledComparison)
    return found


def test_equal_passes_pass() -> None:
    found = compare(make_engine(trial_pass([3.0, 4.0]), trial_pass([3.0, 4.0])))
    assert found == CompiledComparison(
        loss=2.0,
        eager_loss=2.0,
        grad_norm=1.25,  # of the mean over four tokens
        eager_grad_norm=1.25,
        loss_difference=0.0,
        gradient_difference=0.0,
        bound=BOUND,
        worst="t0",
    )
    assert found.passes


def test_differences_are_relative_to_the_eager_pass() -> None:
    found = compare(make_engine(trial_pass([3.0, 4.5], loss=10.0), trial_pass([3.0, 4.0], loss=8.0)))
    assert (found.loss, found.eager_loss, found.loss_difference) == (2.5, 2.0, 0.25)
    assert found.gradient_difference == pytest.approx(0.5 / 5.0)
    assert (found.grad_norm, found.eager_grad_norm) == (pytest.approx(math.hypot(3.0, 4.5) / 4), 1.25)
    assert (found.worst, found.passes, found.is_lost, found.unclear) == ("t1", False, False, "")


@pytest.mark.parametrize(
    ("loss", "eager_loss", "valid", "difference"),
    [
        (9.0, 8.0, 4.0, 0.125),
        (1.5, 1.0, 4.0, 0.125),  # of a loss below one nat per token the absolute difference counts
        (7.0, 8.0, 4.0, 0.125),
        (0.5, 0.25, 0.0, 0.25),  # a rank without valid tokens
        (3.0, 1.5, 1.0, 1.0),
    ],
)
def test_difference_of_losses(loss: float, eager_loss: float, valid: float, difference: float) -> None:
    passes = [trial_pass([1.0], loss=value, valid=valid) for value in (loss, eager_loss)]
    found = compare(make_engine(*passes))
    assert found.loss_difference == difference
    assert (found.loss, found.eager_loss) == (loss / max(valid, 1.0), eager_loss / max(valid, 1.0))
    assert not found.passes


def test_shards_of_other_owners_do_not_count_twice() -> None:
    found = compare(make_engine(trial_pass([3.0, 40.0]), trial_pass([3.0, 4.0]), owners=[True, False]))
    assert (found.grad_norm, found.eager_grad_norm, found.gradient_difference) == (0.75, 0.75, 0.0)
    assert found.worst == "t1"


@pytest.mark.parametrize(
    ("norms", "eager_norms", "is_lost"),
    [
        ([1.0, 0.0], [1.0, LARGE], True),
        ([1.0, LARGE], [1.0, 0.0], True),
        ([1.0, 0.0], [1.0, SMALL], False),
        ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], False),
        ([1.0, BOUND / 2], [1.0, BOUND / 2], False),
        ([8.0, 0.0], [8.0, BOUND / 2], False),  # the share is of the whole gradient
    ],
)
def test_a_gradient_that_is_zero_on_one_side(norms: list[float], eager_norms: list[float], is_lost: bool) -> None:
    found = compare(make_engine(trial_pass(norms), trial_pass(eager_norms)))
    assert (found.is_lost, found.passes) == (is_lost, not is_lost)
    assert found.gradient_difference <= BOUND, "only the loss of a whole tensor counts"


@pytest.mark.parametrize(
    ("norm", "eager_norm", "compute", "unclear"),
    [
        (1.0, math.nan, "fp32", "the eager gradient norm is nan, the compiled one 0.25"),
        (1.0, math.inf, "bf16", "the eager gradient norm is inf, the compiled one 0.25"),
        (math.inf, 1.0, "fp16", "the eager gradient norm is 0.25, the compiled one inf"),
        (math.inf, 1.0, "bf16", ""),
        (math.nan, 1.0, "fp32", ""),
        (0.0, 0.0, "fp32", "the gradient is zero"),
        (1.0, 0.0, "fp32", ""),
        (0.0, 1.0, "fp32", ""),
        (1.0, 1.0, "fp16", ""),
    ],
)
def test_norms_that_cannot_be_compared(norm: float, eager_norm: float, compute: str, unclear: str) -> None:
    found = compare(make_engine(trial_pass([norm]), trial_pass([eager_norm]), compute=compute))
    assert found.unclear == unclear
    assert found.passes == (bool(unclear) or norm == eager_norm)
    if eager_norm == 0.0:
        assert found.gradient_difference == math.inf


def test_the_tensor_with_a_gradient_that_is_not_a_number_is_the_worst() -> None:
    found = compare(make_engine(trial_pass([9.0, math.nan, 1.0]), trial_pass([1.0, 1.0, 1.0])))
    assert found.worst == "t1"


def test_other_random_numbers_explain_any_difference() -> None:
    found = compare(make_engine(trial_pass([3.0], random=[1, 2]), trial_pass([9.0], random=[1, 3])))
    assert found.unclear == "compiled code drew other random numbers than eager code"
    assert found.passes


def test_a_rank_without_parameters() -> None:
    """As a stage whose parameters are all frozen; `any` and `argmax` of nothing must not fail."""
    found = compare(make_engine(trial_pass([]), trial_pass([])))
    assert (found.worst, found.unclear) == ("", "the gradient is zero")


@pytest.mark.parametrize("world", [1, 2])
def test_sums_and_the_worst_rank_are_those_of_all_ranks(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other of two ranks has the same sums, a loss that is wrong by a half, and a lost gradient."""

    def all_reduce(tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        if op == torch.distributed.ReduceOp.SUM:
            tensor *= 2
        else:
            tensor.copy_(torch.maximum(tensor, torch.tensor([0.5, 1.0, 0.0], dtype=tensor.dtype)))

    monkeypatch.setattr(compiled.dist, "all_reduce", all_reduce)
    found = compare(make_engine(trial_pass([4.0]), trial_pass([4.0]), world=world))
    assert (found.loss_difference, found.is_lost, found.passes) == (
        (0.0, False, True) if world == 1 else (0.5, True, False)
    )
    assert found.grad_norm == pytest.approx(1.0 / math.sqrt(world))
    assert found.loss == 2.0


# ---- verdict, messages, records ------------------------------------------------------------------------------------


def comparison(**changes: Any) -> CompiledComparison:
    numbers: dict[str, Any] = {
        "loss": 1.0,
        "eager_loss": 2.0,
        "grad_norm": 3.0,
        "eager_grad_norm": 4.0,
        "loss_difference": 0.01,
        "gradient_difference": 0.02,
        "bound": 0.1,
        "worst": "w",
    }
    return CompiledComparison(**{**numbers, **changes})


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"loss_difference": 0.1, "gradient_difference": 0.1}, True),
        ({"loss_difference": 0.11}, False),
        ({"gradient_difference": 0.11}, False),
        ({"gradient_difference": math.nan}, False),
        ({"is_lost": True}, False),
        ({"is_lost": True, "unclear": "reason"}, True),
        ({"gradient_difference": 0.5, "unclear": "reason"}, True),
    ],
)
def test_what_passes(changes: Mapping[str, Any], passes: bool) -> None:
    assert comparison(**changes).passes is passes


@pytest.mark.parametrize(
    ("compute", "layers", "bound"),
    [
        ("fp64", 6, 2.0 * 2.0**-53 * 12),
        ("fp32", 6, 2.0 * 2.0**-24 * 12),
        ("tf32", 6, 2.0 * 2.0**-17 * 12),
        ("fp16", 6, 2.0 * 2.0**-11 * 12),
        ("bf16", 6, 2.0 * 2.0**-9 * 12),
        ("bf16", 24, 2.0 * 2.0**-9 * 24),
        ("bf16", 96, 0.17),
        ("fp8", 1, 2.0 * 2.0**-6 * math.sqrt(24)),
        ("fp8", 6, 0.17),
    ],
)
def test_the_bound_is_a_random_walk_of_roundings(compute: str, layers: int, bound: float) -> None:
    assert rounding_bound(compute, layers) == pytest.approx(bound, rel=1e-12, abs=0.0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss_difference": 0.5}, "differ by 50.0%;"),
        ({"gradient_difference": 0.3}, "differ by 30.0%;"),
        ({"loss_difference": 0.5, "gradient_difference": math.nan}, "differ by nan;"),
        ({"gradient_difference": math.inf}, "differ by inf;"),
        ({"loss_difference": 0.0, "gradient_difference": 0.001}, "differ by 0.1%;"),
        ({"loss_difference": 0.0, "gradient_difference": 0.0015}, "differ by 0.1%;"),
        ({"loss_difference": 0.0, "gradient_difference": 0.0009}, "differ by 9.0e-04;"),
        ({"is_lost": True}, "differ by 2.0%, and some tensor has no gradient at all on one side;"),
    ],
)
def test_the_refusal_states_the_larger_difference(changes: Mapping[str, Any], text: str) -> None:
    assert text in str(compiled_refusal(comparison(**changes), compute="fp32", where="train.compile"))


def test_the_record_of_a_comparison() -> None:
    assert event_fields("no memory") == {"passed": None, "reason": "no memory"}
    fields = event_fields(comparison())
    assert (fields["passed"], fields["reason"], fields["tensor"]) == (True, None, "w")
    assert event_fields(comparison(gradient_difference=0.5))["passed"] is False
    fields = event_fields(comparison(unclear="reason"))
    assert (fields["passed"], fields["reason"]) == (None, "reason")


# ---- when to compare -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiles", "is_known", "world", "other_is_due", "is_due"),
    [
        (True, False, 1, False, True),
        (True, True, 1, True, False),  # there is no other rank
        (False, False, 1, False, False),
        (True, True, 2, False, False),
        (True, True, 2, True, True),
        (True, False, 2, False, True),
    ],
)
def test_code_is_compared_if_some_rank_never_compared_it(
    compiles: bool, is_known: bool, world: int, other_is_due: bool, is_due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "code_key", lambda engine: "key")
    monkeypatch.setattr(compiled.dist, "all_reduce", lambda tensor, op: tensor.clamp_(min=float(other_is_due)))
    engine = make_engine(world=world)
    engine.settings.compile = compiles
    assert is_comparison_due(engine, {"key"} if is_known else {"other"}) is is_due


@pytest.mark.parametrize(
    ("compute", "on_gpu", "outline", "precision", "expected"),
    [
        ("fp32", False, None, "high", "fp32"),
        ("fp32", True, None, "highest", "fp32"),
        ("fp32", True, None, "high", "tf32"),
        ("fp32", True, "own", "highest", "tf32"),
        ("bf16", True, "own", "high", "bf16"),
    ],
)
def test_products_in_float32_may_be_tf32_on_a_gpu(
    compute: str, on_gpu: bool, outline: str | None, precision: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled.torch, "get_float32_matmul_precision", lambda: precision)
    engine = make_engine(compute=compute, on_gpu=on_gpu)
    engine.outline = outline
    assert compiled._product_precision(engine) == expected


# Bytes of the compiled pass, and of the logits: 2 sequences of 8 tokens over 2 context ranks, 1000 words.
PASS_BYTES = 100_000
EAGER_BYTES = 150_000
LOSS_BYTES = 12 * 8 * 1000


@pytest.mark.parametrize(
    ("free_bytes", "changes", "short_of"),
    [
        (EAGER_BYTES + LOSS_BYTES, {}, ""),
        (EAGER_BYTES + LOSS_BYTES - 1000, {}, "an eager micro-batch may need 246 kB, 1.00 kB more than is free"),
        (EAGER_BYTES + LOSS_BYTES // 4, {"loss_parallel": True}, ""),
        (EAGER_BYTES + LOSS_BYTES // 4 - 1, {"loss_parallel": True}, "174 kB"),
        (EAGER_BYTES, {"has_head": False}, ""),
        (EAGER_BYTES - 1, {"has_head": False}, "150 kB"),
        (EAGER_BYTES, {"is_chunked": True}, ""),
        (EAGER_BYTES, {"world": 2}, "246 kB"),
        (10 * EAGER_BYTES, {"world": 2}, "more than is free"),  # the other rank has less
        (0, {"on_gpu": False}, ""),
    ],
)
def test_the_eager_pass_is_left_out_if_it_may_not_fit(
    free_bytes: int, changes: Mapping[str, Any], short_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        tensor.copy_(torch.maximum(tensor, torch.tensor([500.0, 0.0], dtype=tensor.dtype)))

    def tensor(values: Sequence[float], device: Any, dtype: torch.dtype) -> torch.Tensor:
        return real_tensor(values, dtype=dtype)

    real_tensor = torch.tensor
    monkeypatch.setattr(compiled.dist, "all_reduce", all_reduce)
    stub = SimpleNamespace(
        cuda=SimpleNamespace(max_memory_allocated=lambda device: 7000 + PASS_BYTES),
        tensor=tensor,
        float64=torch.float64,
    )
    monkeypatch.setattr(compiled, "torch", stub)
    engine = make_engine(on_gpu=changes.get("on_gpu", True), world=changes.get("world", 1))
    engine.settings = SimpleNamespace(
        layout=SimpleNamespace(micro_batch=2),
        sequence=8,
        chunks_loss=lambda shape, device: changes.get("is_chunked", False),
        loss_parallel=changes.get("loss_parallel", False),
    )
    heads = [None, "head" if changes.get("has_head", True) else None]
    engine.parts = [SimpleNamespace(model=SimpleNamespace(head=head)) for head in heads]
    found = compiled._short_of_memory(engine, free_bytes, 7000)
    assert bool(found) == bool(short_of)
    assert short_of in found


def test_a_pass_that_would_not_fit_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_device_memory", lambda engine: (5, 6))
    monkeypatch.setattr(compiled, "_short_of_memory", lambda engine, free, used: f"{free} free, {used} used")
    engine = make_engine(trial_pass([1.0]))
    assert compare_compiled(engine, torch.zeros(1, 2), torch.zeros(1, 2)) == "5 free, 6 used"


# ---- traces of a pass ----------------------------------------------------------------------------------------------


class Network(torch.nn.Module):
    """Changes a buffer, replaces another, sets attributes and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("empty", None)
        self.calls = 0

    def forward(self) -> None:
        self.count += 1
        self.mean = self.mean + 1
        self.calls += 1
        self.added = True
        torch.rand(3)


@pytest.mark.parametrize("outline", [None, "own"])
def test_a_pass_leaves_no_trace(outline: str | None) -> None:
    network = Network()
    engine = make_engine()
    engine.outline, engine.parts = outline, [SimpleNamespace(model=network)]
    buffers, random = dict(network._buffers), torch.get_rng_state()
    with compiled.restore_after(engine):
        network()
    assert dict(network._buffers) == buffers, "the same objects"
    assert not network.count.any()
    assert not network.mean.any()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(compiled.drawn_so_far(CPU), random)
    assert (network.calls, hasattr(network, "added")) == ((1, True) if outline is None else (0, False))


def test_the_random_state_of_a_gpu_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(compiled.torch.cuda, "get_rng_state", lambda device: state[0])
    monkeypatch.setattr(compiled.torch.cuda, "set_rng_state", lambda new, device: state.insert(0, new))
    engine = make_engine(on_gpu=True)
    assert torch.equal(compiled.drawn_so_far(engine.device), torch.cat([torch.get_rng_state(), state[0]]))
    with compiled.restore_after(engine):
        state.insert(0, torch.tensor([8], dtype=torch.uint8))
    assert state[0].tolist() == [7]


def test_memory_in_torchs_cache_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[Any] = []
    numbers = {
        "reset_peak_memory_stats": resets.append,
        "memory_allocated": lambda device: 100,
        "memory_reserved": lambda device: 130,
        "mem_get_info": lambda device: (1000, 5000),
    }
    for name, function in numbers.items():
        monkeypatch.setattr(compiled.torch.cuda, name, function)
    engine = make_engine(on_gpu=True)
    assert compiled._device_memory(engine) == (1030, 100)
    assert resets == [engine.device], "the peak that is read later is that of the compiled pass"
    assert compiled._device_memory(make_engine()) == (0, 0)


class Block(torch.nn.Module):
    """Its forward runs once more in backward if its results are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.weight * x).sin().exp()


@pytest.mark.parametrize(
    ("is_compiled", "has_own_forward", "outline", "calls"),
    [(True, False, None, 2), (False, False, None, 1), (True, True, None, 1), (True, False, "own", 1)],
)
def test_compiled_blocks_recompute_in_an_eager_pass(
    is_compiled: bool, has_own_forward: bool, outline: str | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stances: list[str] = []

    def set_stance(stance: str) -> Any:
        stances.append(stance)
        return nullcontext()

    monkeypatch.setattr(compiled.torch.compiler, "set_stance", set_stance)
    block = Block()
    block._compiled_call_impl = True if is_compiled else None
    if has_own_forward:
        block.forward = block.forward  # type: ignore[method-assign]
    before = dict(vars(block))
    engine = make_engine()
    engine.outline, engine.parts = outline, [SimpleNamespace(model=SimpleNamespace(layers={"0": block}))]
    with compiled.run_eagerly(engine):
        block.forward(torch.ones(2)).sum().backward()  # an input without a gradient, as the first block may have
    assert block.weight.grad is not None
    assert stances == ["force_eager"]
    assert block.calls == calls
    assert vars(block).keys() == before.keys()


def test_the_cache_folder_is_torchs_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache/here")
    assert compiled.cache_folder() == "/cache/here"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert "torchinductor" in compiled.cache_folder()
