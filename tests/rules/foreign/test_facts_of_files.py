"""What a file says goes before what its trainer does: loss scale, buckets, memory logs, heartbeats, timeouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rules.kit import answers

from phalanx.rules.catalog.silences import longest_silence
from phalanx.rules.evidence import Evidence
from phalanx.rules.gather import Request, gather_evidence
from phalanx.rules.specification import check

ARGUMENTS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 50304 --micro-batch-size 2 --global-batch-size 512 --train-iters 100000 "
    "--tensor-model-parallel-size 2 --lr 3e-4 --lr-warmup-iters 2000 --mock-data --save out --save-interval 1000 "
    "--use-distributed-optimizer "
)


def gathered(tmp_path: Path, more: str, *, cluster: str = "8xH100:16") -> Evidence:
    from phalanx.rules.specification import this_day

    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nnodes 16 --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS} {more}\n", encoding="utf-8")
    return gather_evidence(str(path), Request(look=False, cluster=cluster), today=this_day(), environ={})


@pytest.mark.parametrize(
    ("scale", "verdict"), [(0, "pass"), (4096, "fail"), (None, "unknown")], ids=["dynamic", "fixed", "not-here"]
)
def test_deepspeeds_json_scales_the_loss(tmp_path: Path, scale: int | None, verdict: str) -> None:
    if scale is not None:
        (tmp_path / "ds.json").write_text(
            json.dumps({"fp16": {"enabled": True, "loss_scale": scale}}), encoding="utf-8"
        )
    found = gathered(tmp_path, "--fp16 --loss-scale 12 --deepspeed --deepspeed_config ds.json")
    assert [one.verdict for one in answers("PRC001", found)] == [verdict]
    alone = gathered(tmp_path, "--fp16 --loss-scale 12")
    assert [one.verdict for one in answers("PRC001", alone)] == ["fail"]


def test_deepspeeds_buckets_are_not_megatrons(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    found = gathered(tmp_path, "--bf16 --deepspeed --deepspeed_config ds.json")
    (said,) = answers("COM003", found)
    assert "bucket" in said.outcome.what
    assert said.verdict == "pass"
    assert found.the_job.comm.bucket_mib == pytest.approx(500_000_000 * 4 / 2**20, abs=0.1)


def test_what_a_flag_adds_is_not_missing(tmp_path: Path) -> None:
    without = gathered(tmp_path, "--bf16")
    assert "memory" in answers("TEL001", without)[0].outcome.what
    assert answers("FLT001", without)[0].verdict == "habit"
    found = gathered(tmp_path, "--bf16 --log-memory-to-tensorboard --enable-ft-package")
    assert "memory" not in answers("TEL001", found)[0].outcome.what
    assert [one.verdict for one in answers("FLT001", found) if one.outcome.applies] == ["pass"]


def test_no_timeout_is_proposed_that_a_save_and_an_evaluation_outlast(tmp_path: Path) -> None:
    found = gathered(tmp_path, "--bf16 --eval-iters 200 --distributed-timeout-minutes 600", cluster="8xA100:16")
    pause = longest_silence(found)
    assert pause is not None
    assert "evaluation after it" in pause.what
    told = [one for one in answers("COM004", found) if one.verdict == "fail"]
    assert told
    for one in told:
        assert one.severity in ("warning", "info")
        assert one.outcome.edits == (), "an edit would be called safe"
        proposed = re.match(r"lower it to ([\d,]+) s", one.outcome.fix)
        assert proposed is not None
        assert float(proposed[1].replace(",", "")) >= 2 * pause.seconds
        assert one.line == 1


def test_nothing_is_said_of_a_timeout_while_nobody_knows_how_long_a_save_takes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    text = '{"train_batch_size": 512, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "steps_per_print": 10}'
    path.write_text(text, encoding="utf-8")
    report = check(path)
    assert {one.verdict for one in report.findings if one.rule.id == "COM004"} == {"unknown"}
    assert report.exit_code == 0


def test_a_layout_that_does_not_fit_hides_nothing(tmp_path: Path) -> None:
    found = gathered(tmp_path, "--bf16 --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --lr 5")
    assert [one.verdict for one in answers("MEM001", found)] == ["fail"]
    assert "does not fit" in answers("MEM001", found)[0].outcome.what
    assert [one.verdict for one in answers("OPT001", found)] == ["fail"]
    assert found.plan is not None
    assert found.plan.memory.total_bytes > found.plan.memory.device_bytes
    assert [one.verdict for one in answers("BAT001", found)] == ["pass"]
