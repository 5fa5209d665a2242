"""Every optimizer, and what is kept in host memory or sent as factors, has its price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import phalanx
from phalanx.errors import UserError
from phalanx.plan.case_columns import build_cases, layout_columns
from phalanx.plan.make import checkpoint_bytes
from phalanx.plan.optimizer import newton_schulz_flops
from phalanx.plan.physics import shipped_profiles
from phalanx.plan.score import price_layouts
from phalanx.plan.search import search_layouts
from phalanx.plan.text import plan_text

OTHERS = ("adamw8bit", "adafactor", "muon")


def test_adamw_in_fp32_changes_nothing(make_ask):
    request = make_ask()
    assert request.profile == shipped_profiles()["phalanx"]
    assert request.memory.optimizer_bytes == 12.0
    assert request.memory.table_optimizer_bytes == 0.0


def test_bytes_per_parameter(make_ask):
    found = {name: make_ask(optim__name=name).memory.optimizer_bytes - 4.0 for name in ("adamw", *OTHERS)}
    assert found == pytest.approx({"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "adafactor": 0.0, "muon": 4.0})
    assert make_ask(precision__optimizer_state="bf16").memory.optimizer_bytes == 8.0


def test_muon_pays_adamw_for_embedding_and_head(make_ask):
    request = make_ask(optim__name="muon", parallel__mode="fixed", parallel__data=16)
    layout = search_layouts(replace(request, memory=replace(request.memory, usable=9.0))).best.layout
    _, _, memory = price_layouts(request, [layout])
    tables = 2 * request.model.vocab * request.model.hidden
    matrices = phalanx.job.parameter_counts.count_parameters(request.model).total - tables
    assert float(memory.optimizer[0]) == pytest.approx(matrices * 8.0 + tables * 12.0, rel=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_take_longer_than_fused_adamw(make_ask, name):
    plain, other = make_ask(), make_ask(optim__name=name)
    layout = search_layouts(plain).best.layout
    seconds = [float(price_layouts(request, [layout])[1].optimizer_s[0]) for request in (plain, other)]
    assert seconds[1] > 2 * seconds[0]


def test_newton_schulz_by_hand(make_ask):
    """Llama-3 8B on one device: 6 n² m per matrix, n the shorter side."""
    request = make_ask(optim__name="muon")
    layout = replace(search_layouts(request).best.layout, data=1, shard=1, zero=0, tensor=1, pipeline=1, context=1)
    table = build_cases(request, layout_columns([layout]))
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3]
    whole = 32 * sum(6.0 * a * b * min(a, b) for a, b in shapes)
    assert float(np.max(newton_schulz_flops(table))) == pytest.approx(whole)
    shared = build_cases(request, layout_columns([replace(layout, data=8, shard=8, zero=1, tensor=2)]))
    assert float(np.max(newton_schulz_flops(shared))) == pytest.approx(whole / 16)


def test_a_checkpoint_of_eight_bit_moments_is_as_large_as_of_wide_ones(make_ask):
    plain, eight, bf16 = make_ask(), make_ask(optim__name="adamw8bit"), make_ask(precision__optimizer_state="bf16")
    layout = search_layouts(plain).best.layout
    sizes = [checkpoint_bytes(request, layout) for request in (plain, eight, bf16)]
    assert sizes[1] == pytest.approx(sizes[0])
    assert sizes[2] == pytest.approx(sizes[0] * 10 / 14)


def test_parameters_in_host_memory_leave_only_what_is_gathered(make_ask):
    request = make_ask("llama-3-70b", cluster="8xH100:1", parallel__offload="parameters", batch=64)
    found = search_layouts(request).best.layout
    assert (found.offload, found.zero) == ("parameters", 3)
    _, times, memory = price_layouts(request, [found, replace(found, offload="none")])
    for part in ("gradients", "optimizer"):  # FSDP2 keeps shards in the master format, which counts as optimizer state
        assert getattr(memory, part)[0] == 0 < getattr(memory, part)[1]
    assert memory.gathered[0] == memory.gathered[1] > 0
    assert times.step_s[0] > times.step_s[1]


def test_parameters_cross_the_host_link_for_every_micro_batch(make_ask):
    """12 bytes per owned parameter and micro-batch over 25 GB/s, partly behind the compute."""
    request = make_ask("llama-3-70b", cluster="8xH100:1", parallel__offload="parameters", sequence=512, batch=8)
    layout = replace(
        search_layouts(request).best.layout, tensor=1, pipeline=1, context=1, data=8, shard=8, micro_batch=1
    )
    _, times, _ = price_layouts(request, [layout, replace(layout, offload="none")])
    owned = phalanx.job.parameter_counts.count_parameters(request.model).total / 8
    link_s = owned * 12.0 / 25e9
    assert link_s <= float(times.micro_s[0]) <= link_s + float(times.micro_s[1])


def test_one_device_may_keep_its_parameters_in_host_memory(make_job):
    plan = phalanx.plan(make_job("llama-3-8b", cluster="H100:1", parallel__offload="parameters", batch=8))
    assert (plan.layout.offload, plan.layout.zero, plan.layout.devices) == ("parameters", 3, 1)
    assert plan.memory.parts_bytes["optimizer"] == 0
    assert "ZeRO-3 and host traffic" in plan_text(plan)


def test_hosts_too_small_for_the_parameters_are_said(make_job):
    plan = phalanx.plan(
        make_job("llama-3.1-405b", cluster="8xH100:1", parallel__offload="parameters", parallel__recompute="full")
    )
    said = next(text for text in plan.warnings if "parameters in host memory: about 7.79 TB of state" in text)
    assert "and the hosts have 2.05 TB" in said


def test_an_optimizer_that_hosts_cannot_hold_is_not_offloaded_unasked(make_ask):
    ask = make_ask("llama-3-70b", cluster="8xH100:1", batch=64)
    assert {one.layout.offload for one in (search_layouts(ask).best,)} == {"optimizer"}
    small = replace(ask, cluster=replace(ask.cluster, host_memory_bytes=512 * 2**30))
    with pytest.raises(UserError) as caught:
        search_layouts(small)
    assert "16 such devices with the optimizer in host memory" not in str(caught.value)


def test_host_parameters_are_never_chosen_unasked(make_ask):
    with pytest.raises(UserError):
        search_layouts(make_ask("llama-3.1-405b", cluster="8xH100:1"))


def test_powersgd_pays_on_a_slow_network_only(make_ask):
    request = make_ask(parallel__compression="powersgd", cluster="8xH100:4", parallel__tensor=8)
    found = search_layouts(request).best.layout
    assert (found.compression, found.zero) == ("powersgd", 0)
    layouts = [replace(found, compression=kind) for kind in ("none", "bf16", "powersgd")]
    _, fast, memory = price_layouts(request, layouts)
    _, slow, _ = price_layouts(request, layouts, machine={"nic_bytes_per_s": np.asarray(1e9)})
    assert slow.gradient_total_s[2] < 0.5 * slow.gradient_total_s[1] < slow.gradient_total_s[0]
    # Making the factors takes 40 bytes of memory traffic per gradient, whatever the network.
    assert fast.gradient_total_s[2] > 0.5 * slow.gradient_total_s[2]
    assert memory.buffers[1] == memory.buffers[2] > memory.buffers[0]  # what was rounded away is kept, in fp32
    alone = replace(found, data=1, tensor=1, pipeline=1)
    assert float(price_layouts(request, [alone])[1].gradient_total_s[0]) == 0.0


def test_powersgd_bytes_are_those_of_its_factors(make_ask):
    request = make_ask(parallel__compression="powersgd", cluster="H100:16", parallel__tensor=4, parallel__pipeline=2)
    plan_data = next(
        use for use in phalanx.plan.mapping.map_axes(request, search_layouts(request).best.layout) if use.axis == "data"
    )
    weights = phalanx.job.parameter_counts.count_parameters(request.model).total / 8
    thin = weights * 32.0 / request.model.hidden
    assert plan_data.bytes_per_step == pytest.approx(2 * thin * (1 - 1 / 2), rel=0.2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"parallel__offload": "parameters", "parallel__zero": 1},
            'parallel.offload = "parameters", but parallel.zero = 1\n'
            "  only ZeRO-3 gives the parameters back after each layer\n"
            "  use parallel.zero = 3, or another offload",
        ),
        (
            {"parallel__compression": "powersgd", "parallel__zero": 3},
            'parallel.compression = "powersgd", but parallel.zero = 3\n'
            "  it factors whole gradient matrices, and ZeRO cuts them at any row\n"
            "  use parallel.zero = 0, or another compression",
        ),
    ],
)
def test_a_zero_stage_that_cannot_is_refused(make_ask, settings, told):
    with pytest.raises(UserError) as caught:
        make_ask(**settings)
    assert told in str(caught.value)
