"""Findings about launch scripts of others rest on what the script says: what it leaves open, tries or explains is none.

Each pair is a script with a fault and the same one with what takes the ground from under the finding.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.rules.foreign.detect import TrainsNothingError
from phalanx.rules.specification import check
from phalanx.rules.worth_telling import TRIAL_S, slurm_seconds

ARGUMENTS = """\
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
  --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --swiglu \\
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 \\
  --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \\
  --overlap-param-gather --recompute-activations --bf16 --micro-batch-size 1 --global-batch-size 512 \\
  --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 \\
  --clip-grad 1.0 --save /ckpt --load /ckpt --save-interval 250 --async-save --data-path /data/text"""


def script(*before: str, more: str = "", program: str = "pretrain_gpt.py", hosts: str = "16") -> str:
    """A sound launch on 16 hosts of 8; of an argument given twice the last holds."""
    head = "".join(f"{line}\n" for line in before)
    return f"#!/bin/bash\n{head}torchrun --nnodes {hosts} --nproc_per_node 8 {program} \\\n{ARGUMENTS} \\\n  {more}\n"


def told(tmp_path: Path, rule: str, text: str, *, cluster: str | None = None, name: str = "run.sh") -> set[str]:
    """Severities of what the rule finds."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    report = check(path, cluster=cluster)
    return {one.severity for one in report.problems if one.rule.id == rule} - {"info"}


IB, P2P = "export NCCL_IB_DISABLE=1", "export NCCL_P2P_DISABLE=1"
STUDENT = "torchrun --nproc_per_node 4 train.py --model_name_or_path m --per_device_train_batch_size 1 \\\n"
STUDENT = f"#!/bin/bash\nENV\n{STUDENT}  --gradient_accumulation_steps 8 --num_train_epochs 1 --output_dir out\n"
NO_SCHEDULE = "--pipeline-model-parallel-size 16 --global-batch-size 64"
WHOLE_HOSTS = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
PAIRS = {
    "links between hosts, and one host": ("ENV001", script(IB), script(IB, hosts="1")),
    "links between hosts, and a launcher that names none": (
        "ENV001",
        STUDENT.replace("ENV", IB).replace("torchrun", "torchrun --nnodes $HOSTS"),
        STUDENT.replace("ENV", IB),
    ),
    "links between hosts, and more hosts that are held than used": (
        "ENV001",
        script("#SBATCH --nodes=4", IB, hosts="4"),
        script("#SBATCH --nodes=4", IB, hosts="1"),
    ),
    "links within a host, and one device": (
        "ENV001",
        STUDENT.replace("ENV", P2P),
        STUDENT.replace("ENV", P2P).replace("_node 4", "_node 1"),
    ),
    "links within a host, and one device that is seen": (
        "ENV001",
        STUDENT.replace("ENV", P2P + "\nexport CUDA_VISIBLE_DEVICES=0,3"),
        STUDENT.replace("ENV", P2P + "\nexport CUDA_VISIBLE_DEVICES=3"),
    ),
    "NCCL's own InfiniBand, and a network that is a plugin": (
        "ENV001",
        script(IB + "\nexport NCCL_DEBUG=INFO"),
        script(IB + "\nexport FI_PROVIDER=efa"),
    ),
    "a variable that was left in, and one with its reason": (
        "ENV001",
        script("# threads", "export CUDA_LAUNCH_BLOCKING=1"),
        script("# do not remove or the training hangs", "export CUDA_LAUNCH_BLOCKING=1"),
    ),
    "a rate of language models, and a model of images": (
        "OPT001",
        script(more="--lr 0.3"),
        script(more="--lr 0.3 --num-classes 1000 --img-h 224", program="pretrain_vision_classify.py"),
    ),
    "devices that do not divide, and hosts that are one for a try": (
        "TOP005",
        script("NNODES=1", more="--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16", hosts="$NNODES"),
        script(
            "NNODES=${3:-1}", more="--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16", hosts="$NNODES"
        ),
    ),
    "a batch that does not divide, and a fork that splits it elsewhere": (
        "TOP005",
        script(more="--global-batch-size 100"),
        script(more="--global-batch-size 100 --flexpipe-config layout.json"),
    ),
    "chunks without a pipeline, and stages that nobody knows": (
        "TOP005",
        script(more="--num-layers-per-virtual-pipeline-stage 2"),
        script("PP=4", "source ../sizes.sh", more="--num-layers-per-virtual-pipeline-stage 2 "
               "--pipeline-model-parallel-size $PP"),
    ),
    "recomputation without a method, and one that is selective": (
        "TOP005",
        script(more="--recompute-granularity full").replace("--recompute-activations ", ""),
        script(more="--recompute-granularity full"),
    ),
    "a resume without moments, and made-up data": (
        "CKP006",
        script(more="--no-load-optim --no-load-rng"),
        script(more="--no-load-optim --no-load-rng --mock-data"),
    ),
    "a rate of Adam, and a fork's own optimizer": (
        "OPT001",
        script(more="--lr 0.3"),
        script(more="--lr 0.3 --optimizer-selection vpmc"),
    ),
    "devices that do not divide, and one host that holds the place of more": (
        "TOP005",
        script("MASTER_ADDR=10.0.0.7", more=f"{WHOLE_HOSTS} --master_addr $MASTER_ADDR", hosts="1"),
        script("MASTER_ADDR=localhost", more=f"{WHOLE_HOSTS} --master_addr $MASTER_ADDR", hosts="1"),
    ),
    "expert ranks of a dense model, and experts by a fork's name": (
        "TOP005",
        script(more="--expert-model-parallel-size 8"),
        script(more="--expert-model-parallel-size 8 --num-routed-experts 64"),
    ),
    "a batch that does not divide, and a fork that may round it": (
        "TOP005",
        script(more="--global-batch-size 100"),
        script(more="--global-batch-size 100 --round-batch-up"),
    ),
    "moments that are not saved, and DeepSpeed's engine, which saves them": (
        "CKP006",
        script(more="--no-save-optim"),
        script(more="--no-save-optim --deepspeed --deepspeed_config ds.json"),
    ),
    "a variable that was left in, and a run that exits after a few steps": (
        "ENV001",
        script("export CUDA_LAUNCH_BLOCKING=1", more="--exit-interval 50000"),
        script("export CUDA_LAUNCH_BLOCKING=1", more="--exit-interval 20"),
    ),
    "no warm-up, and fewer tokens than weights": (
        "OPT001",
        script(more="--train-iters 2000").replace("--lr-warmup-iters 2000 ", "").replace("--load /ckpt ", ""),
        script(more="--train-iters 1000").replace("--lr-warmup-iters 2000 ", "").replace("--load /ckpt ", ""),
    ),
    "pickles that were chosen, and the only format of two towers": (
        "SEC001",
        script(more="--ckpt-format torch"),
        script(more="--ckpt-format torch --language-model-type llama3_8b"),
    ),
    "a timeout of two hours, and one within the trainers' defaults": (
        "COM004",
        script(more="--distributed-timeout-minutes 120").replace("--save /ckpt ", ""),
        script(more="--distributed-timeout-minutes 30").replace("--save /ckpt ", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_finding_goes_with_what_it_rests_on(tmp_path: Path, name: str) -> None:
    rule, faulty, sound = PAIRS[name]
    assert told(tmp_path, rule, faulty)
    assert not told(tmp_path, rule, sound)


HEAVY = "--num-experts 64 --moe-router-topk 1 --tensor-model-parallel-size 1"
PLANNED = {
    "a pipeline that idles, and a schedule of the fork's own": (
        "BAT004",
        script(more=NO_SCHEDULE),
        script(more=f"{NO_SCHEDULE} --enable-bidirectional-pipeline"),
    ),
    "checkpoints off, and a job of half an hour": (
        "CKP001",
        script("#SBATCH --time=2-00:00:00").replace("--save /ckpt ", ""),
        script("#SBATCH --time=00:30:00").replace("--save /ckpt ", ""),
    ),
    "a layout that costs twice, and a run that costs little": (
        "EFF005",
        script(more=NO_SCHEDULE),
        script(more=f"{NO_SCHEDULE} --train-iters 200"),
    ),
    "too much for a device, and experts that are DeepSpeed's": (
        "MEM001",
        script(more=HEAVY),
        script(more=f"{HEAVY} --deepspeed --deepspeed_config ds.json"),
    ),
    "a layout that costs twice, and a run of which nobody says how long it is": (
        "EFF005",
        script(more=NO_SCHEDULE),
        script(more=NO_SCHEDULE).replace("--train-iters 100000", "--train-iters $STEPS"),
    ),
    "too much for a device, and a maker's own devices": (
        "MEM001",
        script(more="--micro-batch-size 4").replace("--recompute-activations ", ""),
        script("export HCCL_CONNECT_TIMEOUT=3600", more="--micro-batch-size 4").replace("--recompute-activations ", ""),
    ),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_prediction_goes_with_what_it_rests_on(tmp_path: Path, name: str) -> None:
    rule, faulty, sound = PLANNED[name]
    assert told(tmp_path, rule, faulty, cluster="8xH100:16")
    assert not told(tmp_path, rule, sound, cluster="8xH100:16")


def test_where_nothing_is_saved_none_is_kept(tmp_path: Path) -> None:
    neox = Path(__file__).parent / "data" / "gpt-neox_20b.yml"
    one = neox.read_text(encoding="utf-8").replace('"min_lr"', '"keep_last_n_checkpoints": 1, "min_lr"')
    assert told(tmp_path, "CKP003", one, name="a.yml") == {"error"}
    assert not told(tmp_path, "CKP003", one.replace('"save": "checkpoints",', ""), name="b.yml")


def test_a_batch_that_fewer_data_ranks_make_right_is_left_to_the_program(tmp_path: Path) -> None:
    text = '{"train_batch_size": TOTAL, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}'
    for total, found in (("64", set()), ("128", set()), ("256", {"error"}), ("96", {"error"})):
        assert told(tmp_path, "TOP005", text.replace("TOTAL", total), cluster="8xH100:2", name="ds.json") == found


def cures(tmp_path: Path, rule: str, text: str, *, name: str = "run.sh", cluster: str | None = None) -> str:
    """Sentences, formulas and fixes of what a rule finds."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    found = [one.outcome for one in check(path, cluster=cluster).problems if one.rule.id == rule]
    return " ".join(" ".join((one.what, *one.formula, one.fix)) for one in found)


def test_cures_are_what_the_trainer_can_do(tmp_path: Path) -> None:
    assert "--ckpt-format torch_dist" in cures(tmp_path, "SEC001", script(more="--ckpt-format torch"))
    slow = cures(tmp_path, "EFF005", script(more=NO_SCHEDULE), cluster="8xH100:16")
    assert "best found" in slow
    assert "ZeRO-3" not in slow
    filled = '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}, "train_batch_size": 8}'
    alone = cures(tmp_path, "PRC004", filled, name="ds.json")
    assert "neither clipped" in alone
    assert "auto" not in alone
    assert '= "auto"' in cures(tmp_path, "PRC004", filled.replace("8}", '"auto"}'), name="ds.json")
    large = (
        '[model]\nname = "llama3"\nflavor = "405B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\nsteps = 3000\n'
    )
    memory = cures(tmp_path, "MEM001", large, name="run.toml", cluster="8xH100:4")
    assert "a smaller training.local_batch_size first" in memory
    assert "training.enable_cpu_offload" in memory


def test_what_is_not_loaded_is_not_brought_back(tmp_path: Path) -> None:
    told = cures(tmp_path, "CKP006", script(more="--no-save-optim --load /other --no-load-rng"))
    assert "brought back" in told
    assert "rng" not in told.partition("brought back")[2]


def test_a_table_that_stands_there_twice_is_named_itself(tmp_path: Path) -> None:
    text = "base_model: m\nmicro_batch_size: 1\nsequence_len: 512\nextra: null\nextra:\n  inner: 1\n"
    assert cures(tmp_path, "TOP005", text, name="a.yaml").startswith("extra also stands on line 4")


def test_a_file_that_calls_itself_a_trial_is_one(tmp_path: Path) -> None:
    text = script("export CUDA_LAUNCH_BLOCKING=1")
    assert told(tmp_path, "ENV001", text, name="latest.sh")
    assert not told(tmp_path, "ENV001", text, name="debug_8b.sh")


def test_what_sockets_never_use_is_not_told_beside_them(tmp_path: Path) -> None:
    path, without = tmp_path / "run.sh", "export NCCL_NET_GDR_LEVEL=0"
    for lines, places in (((without,), {"NCCL_NET_GDR_LEVEL"}), ((without, IB), {"NCCL_IB_DISABLE"})):
        path.write_text(script(*lines), encoding="utf-8")
        assert {one.outcome.what.partition("=")[0] for one in check(path).problems if one.rule.id == "ENV001"} == places


def test_one_setting_is_told_once_and_is_to_be_lowered_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script(more="--distributed-timeout-minutes 120").replace("--save /ckpt ", ""), encoding="utf-8")
    for cluster in (None, "8xH100:16"):
        (found,) = [one for one in check(path, cluster=cluster).problems if one.rule.id == "COM004"]
        assert found.outcome.threshold == 600
        assert found.outcome.fix.startswith("lower it to 600 s, the trainer's default")


def test_a_published_rate_is_no_slip_with_a_small_batch(tmp_path: Path) -> None:
    text = script(more="--lr 1e-3 --global-batch-size 64")
    assert not told(tmp_path, "OPT001", text, cluster="8xH100:16")
    assert told(tmp_path, "OPT001", text.replace("--lr 1e-3", "--lr 1e-2"), cluster="8xH100:16")


def test_a_sum_of_few_terms_is_a_remark(tmp_path: Path) -> None:
    text = script(more="--grad-reduce-in-bf16", hosts="1")
    assert told(tmp_path, "PRC002", text, cluster="8xH100:1")
    assert not told(tmp_path, "PRC002", text.replace("batch-size 512", "batch-size 4"), cluster="8xH100:1")


def test_paths_of_other_trainers_may_lead_anywhere(tmp_path: Path) -> None:
    assert not told(tmp_path, "SEC003", script(more="--save ../files --load ../files"))


@pytest.mark.parametrize("program", ["tools/hf2megads_weight_converter.py", "get_training_info.py"])
def test_programs_that_train_nothing_are_passed_over(tmp_path: Path, program: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script(program=program), encoding="utf-8")
    with pytest.raises(TrainsNothingError):
        check(path)


def test_a_program_that_is_told_to_infer_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script(program="run_model.py", more="--inference"), encoding="utf-8")
    with pytest.raises(TrainsNothingError):
        check(path)


@pytest.mark.parametrize(("text", "trial"), [("240", True), ("4:00:00", True), ("0-05", False), ("1-00:00:00", False)])
def test_limits_of_slurm(text: str, trial: bool) -> None:
    assert (0 < slurm_seconds(text) <= TRIAL_S) is trial


KEY = "0f3a9c7d51be42e86a90" + "c4d7e1b8f2063a5d9e47"  # made up, of the form that a tracker gives


@pytest.mark.parametrize("place", ["variable", "argument", "trial"])
def test_a_credential_in_a_script_is_an_error_and_is_never_shown(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("debug.sh" if place == "trial" else "run.sh")
    argument = f"--wandb_api_key {KEY}" if place == "argument" else ""
    path.write_text(script("" if argument else f"export WANDB_API_KEY={KEY}", more=argument), encoding="utf-8")
    for options in ([], ["--json"], ["--format", "sarif"]):
        assert main(["check", str(path), *options]) == 1
        page = capsys.readouterr().out
        assert "ENV001" in page
        assert "looks like a credential" in page
        assert KEY not in page
    path.write_text(path.read_text().replace(KEY, "$MY_KEY"), encoding="utf-8")
    main(["check", str(path)])
    assert "looks like a credential" not in capsys.readouterr().out
