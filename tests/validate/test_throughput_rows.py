"""Pricing the rows of a table: what is left out is chosen, what cannot be priced says why."""

import numpy as np
import pytest

from phalanx.plan.cases import RECOMPUTE
from phalanx.validate.throughput_rows import candidates, predict_rows, row_columns

ROW = {
    "id": "a", "model_name": "llama-3-8b", "layers": "32", "hidden": "4096", "seq": "4096", "gpu": "H100-80GB-SXM",
    "gpus": "64", "global_batch": "256", "tp": "2", "pp": "1", "cp": "1", "dp": "32",
}  # fmt: skip


def row(**changes):
    return ROW | {name: str(value) for name, value in changes.items()}


def only(**changes):
    found = predict_rows((row(**changes),))
    assert found.reason == ("",)
    return found


def test_columns_of_a_row():
    columns = row_columns(row(zero_stage=1, vpp=2, pp=2, dp=16), 4, "full")
    wanted = {"tp": 2, "pp": 2, "vpp": 2, "dp": 16, "cp": 1, "micro_batch": 4, "zero": 1, "shard": 16, "layers": 32}
    assert {name: columns[name] for name in wanted} == wanted
    assert RECOMPUTE[int(columns["recompute"])] == "full"


def test_sharing_groups_include_context_ranks():
    assert row_columns(row(cp=4, dp=8, zero_stage=3), 1, "none")["shard"] == 32
    assert row_columns(row(zero_stage=0), 1, "none")["shard"] == 1


def test_an_empty_dp_is_what_the_other_axes_leave():
    assert row_columns(row(dp=""), 1, "none")["dp"] == 32


def test_an_empty_dp_predicts_what_the_stated_one_does():
    tiny = {"model_name": "tiny", "layers": 4, "hidden": 256, "heads": 4, "seq": 128, "vocab": 1000, "tp": 1, "gpus": 8}
    tiny |= {"global_batch": 24, "recompute": "none"}  # three sequences per rank: only a micro-batch of 1 divides them
    assert only(**tiny, dp="").times.step_s == only(**tiny, dp=8).times.step_s


def test_stated_settings_leave_one_case():
    assert len(candidates(row(micro_batch=2, recompute="full"))) == 1
    assert len(candidates(row(micro_batch=2))) == 3
    assert len(candidates(row())) == 12  # 1, 2, 4 or 8 of 8 sequences, times three kinds of recompute


def test_the_fastest_that_fits_is_meant():
    """Room enough: no recompute. On a small device the same row must have recomputed."""
    chosen = {}
    for gpu in ("H200-141GB-SXM", "A100-40GB-SXM"):
        found = only(gpu=gpu, micro_batch=2, seq=8192, zero_stage=1)
        chosen[gpu] = RECOMPUTE[int(found.cases.recompute.item())]
    assert chosen["A100-40GB-SXM"] == "full", "states alone take 24 GB"
    assert chosen["H200-141GB-SXM"] != "full"


def test_the_choice_is_the_fastest_of_its_candidates():
    free = only(gpu="B200-SXM", recompute="none").times.step_s.item()
    each = [only(gpu="B200-SXM", recompute="none", micro_batch=size).times.step_s.item() for size in (1, 2, 4, 8)]
    assert free == pytest.approx(min(each))


def test_unknown_device_gives_a_reason_and_the_rest_is_priced():
    found = predict_rows((row(id="a"), row(id="b", gpu="H900"), row(id="c", layers=""), row(id="d")))
    assert found.reason == ("", "unknown accelerator 'H900'", "layers is empty", "")
    assert found.priced.tolist() == [0, 3]
    assert found.times.step_s[0] == found.times.step_s[1]


def test_no_row_at_all_can_be_priced():
    found = predict_rows((row(layers=""), row(gpus="-1")))
    assert found.priced.size == 0
    assert found.times.step_s.size == 0
    assert found.reason == ("layers is empty", "gpus = -1 is less than 1")
    assert predict_rows(()).priced.size == 0


def test_a_row_does_not_depend_on_its_neighbours():
    rows = (row(id="a"), row(id="b", tp=8, dp=8, micro_batch=1), row(id="c", model_name="mixtral-8x7b", ep=8))
    together = predict_rows(rows)
    for index, one in enumerate(rows):
        alone = predict_rows((one,))
        assert together.times.step_s[index] == pytest.approx(alone.times.step_s.item())
        assert together.memory.total[index] == pytest.approx(alone.memory.total.item())


def test_the_framework_and_its_date_choose_the_profile():
    names = [
        predict_rows((row(framework=framework, date=date),)).frameworks
        for framework, date in (("megatron-lm", "2021"), ("megatron-lm", "2024"), ("x", ""))
    ]
    assert names == [("megatron-lm",), ("megatron-core",), ("default",)]


@pytest.mark.parametrize(
    "changes", [{"tp": 1, "dp": 64}, {"pp": 8, "dp": 4, "vpp": 4}, {"cp": 8, "dp": 4, "seq": 131072}]
)
def test_layout_columns_matter(changes):
    assert only(**changes).times.step_s != only().times.step_s


def test_a_slow_network_is_slower():
    assert only(inter_link_gbps_per_gpu=10).times.step_s > only(inter_link_gbps_per_gpu=400).times.step_s


def test_everything_is_finite():
    found = predict_rows(tuple(row(id=str(size), gpus=size, dp=size // 2) for size in (2, 8, 512, 16384)))
    assert np.all(np.isfinite(found.times.step_s))
    assert np.all(found.times.step_s > 0)
