"""What the rules say of other trainers' files: by what stands in them, never by a default of ours."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest
from rules.kit import answers

from phalanx.errors import UserError
from phalanx.rules.evidence import Evidence
from phalanx.rules.gather import Request, gather_evidence
from phalanx.rules.outcome import Verdict
from phalanx.rules.run_rules import Finding

TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = {steps}\nseq_len = 8192\n'
MEGATRON = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50304 --bf16 "
    "--max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 512 --train-iters 100000 --save out "
)


def gathered(
    tmp_path: Path,
    name: str,
    text: str,
    *,
    settings: Sequence[str] = (),
    cluster: str | None = "8xH100:16",
    **more: object,
) -> Evidence:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    kinds = {"run.toml": "torchtitan", "args.txt": "megatron", "ds.json": "deepspeed", "a.yaml": "accelerate"}
    kind = kinds.get(name, "llama-factory")
    request = Request(look=False, source=kind, cluster=cluster, overrides=tuple(settings), **more)  # type: ignore[arg-type]
    return gather_evidence(str(path), request, today=date(2026, 11, 15), environ={"HOME": "/dev/null"})


def titan(tmp_path: Path, text: str, *, steps: int = 1_000_000, cluster: str | None = "8xH100:16") -> Evidence:
    size = "" if "local_batch_size" in text else "local_batch_size = 1\n"
    return gathered(tmp_path, "run.toml", TITAN.format(steps=steps) + size + text, cluster=cluster)


def of(rule: str, found: Evidence, at: str = "") -> list[tuple[Verdict, str]]:
    """Verdicts and lines of a rule, those that point at a key."""
    return [(one.verdict, one.outcome.what) for one in answers(rule, found) if at in ("", one.outcome.at)]


def fixes(rule: str, found: Evidence) -> str:
    return " ".join(one.outcome.fix for one in answers(rule, found))


DEEPSPEED = '{"train_batch_size": 512, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.mark.parametrize(("name", "text"), [("ds.json", DEEPSPEED), ("a.yaml", FSDP)])
def test_an_interval_that_no_file_says_is_not_judged(tmp_path: Path, name: str, text: str) -> None:
    settings = ("model.preset=llama-3-8b", "data.tokens=1T", "batch.global_sequences=512", "batch.micro=1")
    found = gathered(tmp_path, name, text, settings=settings)
    for rule in ("CKP001", "CKP004", "EFF001"):
        verdicts = dict(of(rule, found))
        assert "pass" not in verdicts, rule
        assert "give --set checkpoint.interval_s=…" in fixes(rule, found)
    said = gathered(tmp_path, name, text, settings=(*settings, "checkpoint.interval_s=100000"))
    assert [verdict for verdict, _ in of("CKP001", said)] == ["fail"]


def test_moments_and_weights_of_a_training_script_are_not_known(tmp_path: Path) -> None:
    settings = ("model.preset=llama-3-8b", "batch.global_sequences=512", "batch.micro=1")
    found = gathered(tmp_path, "a.yaml", FSDP, settings=settings)
    for key in ("precision.optimizer_state", "precision.master_weights"):
        assert [verdict for verdict, _ in of("PRC002", found, key)] == ["unknown"]
    # What a trainer documents is known: fp32 copies and moments, without a word in the file.
    known = gathered(tmp_path, "ds.json", DEEPSPEED, settings=("model.preset=llama-3-8b",))
    for key in ("precision.optimizer_state", "precision.master_weights"):
        assert [verdict for verdict, _ in of("PRC002", known, key)] == ["pass"]
    for other in (titan(tmp_path, ""), gathered(tmp_path, "args.txt", MEGATRON)):
        assert [verdict for verdict, _ in of("PRC002", other)] == ["pass"] * 3


def test_a_timeout_that_cannot_be_read_is_not_judged_by_its_default(tmp_path: Path) -> None:
    found = gathered(tmp_path, "args.txt", MEGATRON + "--distributed-timeout-minutes $MINUTES")
    assert [verdict for verdict, _ in of("COM004", found)] == ["unknown", "unknown"]
    assert "Megatron-LM: --distributed-timeout-minutes, in minutes" in fixes("COM004", found)
    titans = titan(tmp_path, '[comm]\ninit_timeout_seconds = "soon"\n')
    assert [verdict for verdict, _ in of("COM004", titans, "comm.init_timeout_s")] == ["unknown"]
    assert [verdict for verdict, _ in of("COM004", titan(tmp_path, ""), "comm.init_timeout_s")] == ["pass"]


@pytest.mark.parametrize(("steps", "severity"), [(1_000_000, "error"), (10, "warning")])
def test_checkpoints_that_are_off_are_named_so(tmp_path: Path, steps: int, severity: str) -> None:
    found = titan(tmp_path, "[checkpoint]\nenable = false\ninterval = 50\n", steps=steps)
    first: Finding = answers("CKP001", found)[0]
    assert first.outcome.what == "checkpoints are off: a failure costs all work so far, and the end keeps nothing"
    assert first.outcome.severity == severity
    assert "turn them on (torchtitan: checkpoint.enable)" in first.outcome.fix
    assert [one.outcome.applies for one in answers("CKP004", found)] == [False]
    assert "there are none to keep" in of("CKP003", found)[0][1]


def test_checkpoints_that_are_off_are_no_question_of_steps(tmp_path: Path) -> None:
    from phalanx.rules.foreign.convert import convert_config

    path = tmp_path / "run.toml"
    path.write_text(TITAN.format(steps=10) + "[checkpoint]\nenable = false\n", encoding="utf-8")
    found = convert_config(path, "torchtitan")
    assert found.practice.saves is False
    assert ("checkpoint.enable", "practice: saves") in found.mapped
    assert not [one for one in found.unmapped if one.key.startswith("checkpoint.")]


def test_who_sets_an_interval_turns_them_on(tmp_path: Path) -> None:
    off = TITAN.format(steps=1_000_000) + "local_batch_size = 1\n"
    assert "checkpoints are off" in of("CKP001", gathered(tmp_path, "run.toml", off))[0][1]
    found = gathered(tmp_path, "run.toml", off, settings=("checkpoint.interval_s=1000",))
    assert "checkpoints are off" not in " ".join(what for _, what in of("CKP001", found))


@pytest.mark.parametrize(
    ("local", "total", "verdict", "told", "listed"),
    [
        (4, 4096, "fail", "idles 88%", True),  # drained after 4: 7 / (2 · 4)
        (32, 4096, "pass", "idles 11%", True),  # after 32
        (32, 512, "pass", "idles 11%", False),  # one local batch on each of 16 ranks is the whole step
        (32, 0, "pass", "idles 11%", False),
    ],
)
def test_torchtitan_drains_its_pipeline_after_each_local_batch(
    tmp_path: Path, local: int, total: int, verdict: str, told: str, listed: bool
) -> None:
    text = f"local_batch_size = {local}\n" + (f"global_batch_size = {total}\n" if total else "")
    text += '[parallelism]\npipeline_parallel_degree = 8\npipeline_parallel_schedule = "Interleaved1F1B"\n'
    found = titan(tmp_path, text)
    (said,) = of("BAT004", found)
    assert said[0] == verdict
    assert told in said[1]
    why = {one.key: one.why for one in found.unmapped}
    assert ("training.local_batch_size" in why) == listed
    if verdict == "fail":
        assert "before it is drained (torchtitan: training.local_batch_size)" in fixes("BAT004", found)
        assert any("drained after 4 of the" in line for line in answers("BAT004", found)[0].outcome.formula)


@pytest.mark.parametrize(
    ("flags", "lost"),
    [
        ("--load out --no-load-optim", "moments, scheduler"),
        ("--load out --no-load-rng", "rng"),
        ("--load /other/weights --no-load-optim", ""),  # a start from other weights is no resume
        ("--no-load-optim", ""),
        ("--no-save-optim --no-save-rng", "moments, scheduler, rng"),
        ("", ""),
    ],
)
def test_a_resume_without_moments_is_not_the_same_run(tmp_path: Path, flags: str, lost: str) -> None:
    said = of("CKP006", gathered(tmp_path, "args.txt", MEGATRON + flags))[0]
    assert said[0] == ("fail" if lost else "pass")
    assert said[1].endswith(lost) or not lost


def test_what_a_resume_lacks_is_told_where_it_is_left_out(tmp_path: Path) -> None:
    lines = MEGATRON.rstrip() + " --load /other/weights\n--no-load-optim --no-load-rng\n--no-save-optim\n"
    found = gathered(tmp_path, "args.txt", lines)
    (said,) = [one for one in answers("CKP006", found) if one.verdict == "fail"]
    assert said.line == len(lines.splitlines())  # not that of --no-load-rng, which is how it starts


def test_a_file_that_only_evaluates_has_no_learning_rate(tmp_path: Path) -> None:
    base = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\n"
    judged = gathered(tmp_path, "sft.yaml", base + "learning_rate: 0.0\nnum_train_epochs: 0.0\n")
    assert not [one for one in answers("TOP001", judged) if "learning rate" in one.outcome.what]
    trains = gathered(tmp_path, "sft.yaml", base + "learning_rate: 0.0\nnum_train_epochs: 3\n")
    (told,) = [one.outcome for one in answers("TOP001", trains) if "learning rate" in one.outcome.what]
    assert (told.severity, told.what) == ("info", "a learning rate of 0: the job starts, and nothing is learnt")


@pytest.mark.parametrize("flag", ["--micro-batch-size", "--tensor-model-parallel-size"])
def test_a_limit_of_our_own_schema_is_no_refusal_of_the_trainer(tmp_path: Path, flag: str) -> None:
    large = gathered(tmp_path, "args.txt", MEGATRON.replace("--micro-batch-size 2", "") + f"{flag} 9000000000")
    said = [one for rule in ("TOP001", "BAT001") for one in answers(rule, large) if "is above" in one.outcome.what]
    assert said
    assert all(one.verdict == "unknown" for one in said)


def test_the_schedule_of_a_longer_run_and_a_test_of_a_few_steps_have_no_long_warm_up(tmp_path: Path) -> None:
    short = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-4 "
    long_warm_up = "--global-batch-size 8 --train-samples 80000 --lr-warmup-samples 60000 "
    for more, told in (
        (long_warm_up, True),
        (long_warm_up + "--lr-decay-samples 8000000", False),
        ("--global-batch-size 8 --train-iters 20 --lr-warmup-iters 19", False),
    ):
        found = gathered(tmp_path, "args.txt", short + more)
        assert any("warm-up takes" in one.outcome.what for one in answers("OPT001", found)) is told


def test_a_fork_is_not_held_to_what_the_original_asks_for(tmp_path: Path) -> None:
    whole = MEGATRON + "--tensor-model-parallel-size 2 --data-path /data/text "
    for more, told in (("", True), ("--use-own-saving", False), ("--save-interval 100", False)):
        found = gathered(tmp_path, "args.txt", whole + more)
        assert any("--save without" in one.outcome.what for one in answers("TOP005", found)) is told


def test_sums_in_fp16_are_told_as_such(tmp_path: Path) -> None:
    fp16 = gathered(tmp_path, "args.txt", MEGATRON.replace("--bf16", "--fp16"))
    (verdict, what), *_ = of("PRC002", fp16, "precision.grad_reduce")
    assert (verdict, what.split(" over ")[0]) == ("habit", "gradients are summed in fp16")
    assert any("fp16 keeps 11 bits" in line for line in answers("PRC002", fp16)[0].outcome.formula)
    ours = gathered(tmp_path, "args.txt", MEGATRON + "--grad-reduce-in-bf16")
    assert "summed in bf16" in of("PRC002", ours, "precision.grad_reduce")[0][1]


def test_how_often_deepspeed_is_started_again_is_its_launchers_matter(tmp_path: Path) -> None:
    settings = ("model.preset=llama-3-8b",)
    assert of("FLT004", gathered(tmp_path, "ds.json", DEEPSPEED, settings=settings))[0][0] == "unknown"
    assert of("FLT004", gathered(tmp_path, "args.txt", MEGATRON))[0][0] == "pass"  # torchrun's own
    assert of("FLT004", gathered(tmp_path, "args.txt", MEGATRON + "--max-restarts 9"))[0][0] == "fail"


def test_what_the_scheduler_does_no_file_says(tmp_path: Path) -> None:
    settings = ("model.preset=llama-3-8b", "batch.global_sequences=1024", "data.tokens=1T")
    found = gathered(tmp_path, "ds.json", DEEPSPEED, settings=settings, cluster="8xH100:128")
    assert [verdict for verdict, _ in of("FLT003", found)] == ["unknown"]
    kept = gathered(tmp_path, "ds.json", DEEPSPEED, settings=(*settings, "fault.spares=9"), cluster="8xH100:128")
    assert [verdict for verdict, _ in of("FLT003", kept)] == ["pass"]


def test_clipping_that_is_left_to_a_trainer_is_not_known(tmp_path: Path) -> None:
    text = DEEPSPEED.replace("{", '{"gradient_clipping": "auto", ', 1)
    settings = ("model.preset=llama-3-8b",)
    found = gathered(tmp_path, "ds.json", text, settings=settings)
    assert not found.stated("optim.clip")
    assert any(verdict == "unknown" and "clips" in what for verdict, what in of("PRC004", found))
    assert gathered(tmp_path, "ds.json", text.replace('"auto"', "1.0"), settings=settings).stated("optim.clip")


def test_megatron_keeps_all_checkpoints_and_says_so(tmp_path: Path) -> None:
    assert of("CKP003", gathered(tmp_path, "args.txt", MEGATRON), "checkpoint.keep")[0][0] == "pass"


@pytest.mark.parametrize("cluster", ["8xH100:16", None])
def test_our_drills_are_no_evidence_for_another_trainer(
    tmp_path: Path, cluster: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.rules.gather.find_drills", lambda *_, **__: pytest.fail("nobody may look for them"))
    assert not titan(tmp_path, "", cluster=cluster).has("D")
    with pytest.raises(UserError, match="--drills says nothing of another trainer"):
        gathered(tmp_path, "args.txt", MEGATRON, drills=(tmp_path,))
