"""`phalanx checkpoints` as a person types it, over checkpoints that were really saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cli.main import main
from phalanx.io.checksums import file_sha256, write_checksums
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, create_run

torch = pytest.importorskip("torch")
from phalanx.train.parallel.tensor_shard import TensorShard  # noqa: E402
from phalanx.train.state.reader import own_first, sound_checkpoints  # noqa: E402
from phalanx.train.state.save import save_checkpoint  # noqa: E402

LAYOUT = {
    **dict.fromkeys(("data", "shard", "context", "pipeline", "virtual_pipeline", "expert", "micro_batch"), 1),
    "tensor": 2,
    "zero": 0,
    "accumulation": 1,
    "sequence_parallel": True,
    "recompute": "none",
    "precision": "fp32",
    "schedule": "1f1b",
    "offload": "none",
    "compression": "none",
}


def save(run: Run, step: int, *, run_id: str | None = None) -> Path:
    """A checkpoint of two ranks."""
    for rank in (1, 0):
        rows = torch.arange(4.0) + rank
        shard = TensorShard(name="w", tensor=rows, shape=(8,), start=(4 * rank,), replicas=1, owner=True, groups={})
        saved = save_checkpoint(
            run.checkpoints,
            step=step,
            attempt="a1",
            shards=[shard],
            meta={"run": run.run_id if run_id is None else run_id, "tokens": 64 * step, "layout": LAYOUT},
            rank=rank,
            world=2,
            keep=9,
        )
    return Path(str(saved.path))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = create_run(tmp_path, "x", job_toml="", job={}, plan_json="{}")
    events = EventWriter(made.events(0), rank=0)
    for step in (10, 20):
        path = save(made, step)
        events.write("checkpoint", step=step, phase="commit", path=path.name)
    events.close()
    return made


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_list_of_sound_checkpoints(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(run.path)]) == 0
    head, columns, newest, oldest, last = lines(capsys)
    size = sum(path.stat().st_size for path in Path(run.checkpoints).glob("*/rank-*"))
    assert head == f"{run.checkpoints}: 2 checkpoints, {size / 1e3:.2f} kB"
    assert columns.split() == ["step", "age", "size", "ranks", "tokens", "layout", "state"]
    assert newest.split()[0] == "20"
    assert newest.endswith("TP2·CP1·PP1·DP1 (ZeRO-0, EP1) mbs1 no-recompute  intact")
    assert oldest.split()[0] == "10"
    assert last == "only file sizes and manifests were checked; --checksum also reads and checks every byte"
    assert main(["checkpoints", str(run.path), "--checksum", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["checkpoints"]
    assert (found["verified"], found["lost_step"], [row["step"] for row in rows]) == (True, None, [20, 10])
    assert sum(row["bytes"] for row in rows) == size
    assert all(row["world"] == 2 and not row["damage"] and row["run_id"] == run.run_id for row in rows)


def test_damage_is_named_and_counts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(run.checkpoints) / "step-00000020" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["checkpoints", str(run.path)]) == 0, "sizes agree"
    capsys.readouterr()
    assert main(["checkpoints", str(run.path), "--checksum"]) == 1
    shown = lines(capsys)
    assert shown[2].endswith("  damaged")
    assert shown[3].endswith("  intact, all bytes checked")
    assert shown[4] == f"damaged: {file}: holds another w than was written: its digest differs"
    plan = SimpleNamespace(job=SimpleNamespace(model=SimpleNamespace(module="")))
    monkeypatch.setattr("phalanx.train.export.Plan.from_json", lambda text, where: plan)
    out = tmp_path / "out"
    assert main(["export", str(run.path), str(out)]) == 3
    assert f"before it: phalanx export {run.path} {out} --step 10\n" in capsys.readouterr().err
    file.write_bytes(data[:-1])
    (Path(run.checkpoints) / "step-00000010" / "manifest.json").write_text("{}")
    assert main(["checkpoints", str(run.path)]) == 1
    shown = lines(capsys)
    assert shown[3].split()[:5] == ["10", *shown[3].split()[1:3], "-", "-"]
    assert f"{file}: has {len(data) - 1:,} bytes instead of {len(data):,}" in shown[4]
    assert "manifest.json: is not a valid manifest" in shown[5]


def test_a_step_that_is_gone_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(Path(run.checkpoints) / "step-00000020")
    assert main(["checkpoints", str(run.path)]) == 1
    assert "missing: step 20 was saved, and is gone" in lines(capsys)


def test_checkpoints_of_another_run_come_last(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 30, run_id="f" * 32)
    assert main(["checkpoints", str(run.path)]) == 0
    assert lines(capsys)[2].endswith("intact, of another run")
    found = list(sound_checkpoints(run.checkpoints))
    ordered, said = own_first(found, run.run_id)
    assert [one.step for one in ordered] == [20, 10, 30]
    (text,) = said.values()
    assert text.startswith(f"{run.checkpoints}/step-00000030: was written by another run (ffffffff…, and this is ")
    assert text.splitlines()[0].endswith(": it is passed over")
    ordered, said = own_first(found[:1], run.run_id)
    assert [one.step for one in ordered] == [30]
    assert ": it is used, as this run has none of its own" in next(iter(said.values()))
    assert own_first(found, "")[1] == {}, "a run of 0.6 has no id"


def test_a_folder_of_exported_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_checksums(tmp_path, {"config.json": file_sha256(tmp_path / "config.json")})
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert lines(capsys) == [f"{tmp_path}: exported weights, 1 file; --checksum checks every byte"]
    assert main(["checkpoints", str(tmp_path), "--checksum"]) == 0
    assert lines(capsys) == [f"{tmp_path}: SHA256SUMS matches 1 file, all bytes checked"]
    (tmp_path / "config.json").write_text("[]")
    assert main(["checkpoints", str(tmp_path), "--checksum"]) == 1
    assert lines(capsys)[1].startswith(f"{tmp_path / 'config.json'}: has changed since it was written: ")


def test_what_is_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert "is not a run: it has no plan.json" in capsys.readouterr().err
