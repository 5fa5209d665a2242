"""`phalanx train` around a fake agent: the flow, the run folder, the report, resuming, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx.cli.main import main
from phalanx.elastic import local_launch as client
from phalanx.record.run import open_run
from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.progress import BuildProgress

if TYPE_CHECKING:
    from phalanx.metrics.prometheus import MetricsServer

FAKE = Path(__file__).parents[1] / "elastic" / "fake_agent.py"
JOB = """\
name = "small"
[model]
preset = "phalanx-tiny"
[data]
path = "data"
sequence = 64
tokens = 20480
[batch]
global_tokens = 2048
[precision]
compute = "fp32"
[fault]
recovery = "stop"
[cluster]
spec = "local-cpu:4"
"""
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
Train = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "\n\n".join(f"document {number} says that {number * 7} is not {number * 3}" for number in range(600))
    (folder / "text.txt").write_text(text)
    recipe = Recipe(
        origins=(TextOrigin(path=folder / "text.txt"),), vocab=300, heldout=0.1, reading=Reading(split_on="blank")
    )
    build_dataset(recipe, folder / "data", lambda size: BuildProgress(sys.stderr, size))
    return folder / "data"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def train(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Call the verb with ranks that behave as told; exit code, stdout, stderr."""

    def call(*arguments: str, ranks: str = "train") -> tuple[int, str, str]:
        monkeypatch.setattr(client, "AGENT", (str(FAKE), ranks))
        code = main(["train", *arguments])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run whose rank raised, with a checkpoint: made once, copied by those that only read it or go on from it."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "data").symlink_to(data)
    (folder / "job.toml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in LAUNCHED:
            patch.delenv(name, raising=False)
        patch.setattr(client, "AGENT", (str(FAKE), "raise"))
        assert main(["train", "job.toml"]) == 3
    return only_run(folder)


@pytest.fixture
def failed(failed_run: Path, here: Path) -> Path:
    """A copy of its own."""
    shutil.copytree(failed_run, here / "runs" / failed_run.name, symlinks=True)
    return here / "runs" / failed_run.name


def only_run(here: Path) -> Path:
    (found,) = (here / "runs").iterdir()
    return found


def test_from_job_to_report(train: Train, here: Path) -> None:
    code, out, err = train("job.toml")
    assert code == 0, err
    run = only_run(here)
    assert run.name.startswith("small-2")
    header = err.splitlines()
    assert header[0].startswith("small: phalanx-tiny, 829k parameters, on local-cpu:4: TP1") or "local:4" in header[0]
    assert header[1].startswith("  predicted: ")
    assert f"  run: {run.relative_to(here)}" in header
    assert any(line.startswith("step 10/10  loss 4.1000") for line in header)
    assert "step 10: held-out loss 4.0000, 2.000 bits per byte" in header
    assert out.startswith(f"{run.relative_to(here)}: done, 10 of 10 steps, 20.5k tokens")
    assert "predicted" in out
    assert "measured" in out
    assert "baselines unigram " in out
    assert "│ Once upon [31m a time" in out


def test_the_run_folder_is_all_that_is_needed_later(train: Train, here: Path) -> None:
    train("job.toml", "--name", "mine", "--runs", "deep/er")
    (run,) = (here / "deep/er").iterdir()
    assert run.name.startswith("mine-")
    assert json.loads((run / "plan.json").read_text())["job"]["data"]["paths"] == [str((here / "data").resolve())]
    code, out, _ = train("--report", str(run))
    assert (code, out.splitlines()[0].split(":")[1]) == (
        0,
        " done, 10 of 10 steps, 20.5k tokens in " + out.split(" in ", 1)[1].split("\n")[0],
    )
    code, out, _ = train("--report", str(run), "--json")
    found = json.loads(out)
    assert (found["steps"], found["state"], found["evaluation"]["bits_per_byte"]) == (10, "done", 2.0)
    assert main(["calibrate", str(run), "--out", str(here / "c.json")]) == 0


def test_metrics_are_served_while_it_trains(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus = pytest.importorskip("prometheus_client") and import_module("phalanx.metrics.prometheus")
    seen, stop = [], prometheus.MetricsServer.stop

    def scraped(server: MetricsServer) -> None:
        with urllib.request.urlopen(server.url, timeout=120) as answer:
            seen.append((server.url, answer.read().decode()))
        stop(server)

    monkeypatch.setattr(prometheus.MetricsServer, "stop", scraped)
    code, _, err = train("job.toml", "--set", "telemetry.prometheus=true")
    assert code == 0, err
    ((url, text),) = seen
    assert f"  metrics: {url}" in err.splitlines()
    assert re.search(r'train_step\{run="small-.*"\} 10\.0', text)


def test_metrics_need_their_library_before_anything_is_made(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    code, out, err = train("job.toml", "--set", "telemetry.prometheus=true")
    assert (code, out) == (2, "")
    assert err == (
        'telemetry.prometheus: needs the Python package "prometheus_client", which is not installed\n'
        "  pip install 'phalanx[metrics]'\n"
    )
    assert not (here / "runs").exists()


def test_json_alone_on_stdout(train: Train) -> None:
    code, out, _ = train("job.toml", "--json", "--steps", "10")
    assert (code, json.loads(out)["planned_steps"]) == (0, 10)


BROKEN = ("--set", "precision.loss_scale=1024")  # PRC001: fp32 needs none
WAIVER = """
[[waiver]]
rule = "PRC001"
reason = "to see what happens"
expires = 2099-12-31
"""


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_an_error_of_the_specification_refuses_the_start(train: Train, here: Path, more: tuple[str, ...]) -> None:
    code, out, err = train("job.toml", *BROKEN, *more)
    assert (code, out) == (1, "")
    assert re.search(r"^job.toml:\d+: E PRC001 loss-scaling  fp32 has the exponents of fp32", err, re.MULTILINE)
    assert "explain: phalanx explain PRC001 job.toml" in err
    assert "job.toml: 1 error against the training specification 2026.1: nothing was started" in err
    assert not (here / "runs").exists()


def test_it_starts_when_that_is_waived_or_unchecked(train: Train, here: Path) -> None:
    code, _, err = train("job.toml", *BROKEN, "--no-check", "--dry-run")
    assert code == 0
    assert "E PRC001" in err  # told all the same
    (here / "job.toml").write_text(JOB + WAIVER)
    code, _, err = train("job.toml", *BROKEN)
    assert code == 0, err
    assert "E PRC001" not in err
    assert "1 waived" in err
    run = only_run(here)
    assert f"check this run: phalanx check {run.relative_to(here)}" in err.splitlines()
    code, _, err = train("--resume", str(run), "--set", "precision.loss_scale=512", "--steps", "12", "--dry-run")
    assert (code, "1 waived" in err) == (0, True)  # the waiver went along with the run


def test_a_resumed_run_and_a_plan_are_checked_too(train: Train, here: Path) -> None:
    train("job.toml")
    run = only_run(here)
    code, _, err = train("--resume", str(run), *BROKEN, "--steps", "12")
    assert code == 1
    assert re.search(rf"^{run}/job.toml:\d+: E PRC001", err, re.MULTILINE)
    assert main(["plan", "job.toml", *BROKEN, "--out", "plan.json"]) == 0
    code, _, err = train("--plan", "plan.json")
    assert (code, "E PRC001" in err) == (1, True)


def test_consent_to_share_gpus_is_part_of_the_job(train: Train) -> None:
    """So that it is recorded, and reaches the agents of other hosts."""
    code, out, _ = train("job.toml", "--dry-run", "--json", "--ranks-per-gpu", "4")
    assert code == 0
    assert json.loads(out)["job"]["train"]["ranks_per_gpu"] == 4
    code, _, err = train("job.toml", "--dry-run", "--ranks-per-gpu", "65")
    assert code == 2
    assert "train.ranks_per_gpu" in err


def test_a_dry_run_starts_nothing(train: Train, here: Path) -> None:
    code, out, _ = train("job.toml", "--dry-run", "--steps", "7")
    assert code == 0
    assert out.startswith("4 ranks would train 7 steps: TP1·CP1·PP1·DP4 (ZeRO-")
    assert not (here / "runs").exists()


def test_a_failed_rank_is_one_message_and_no_report(train: Train, here: Path) -> None:
    code, out, err = train("job.toml", ranks="user")
    assert (code, out) == (2, "")
    assert "data/shard-0003: ends early: 10 bytes of 20\n  it was cut\n  build it again\n" in err
    assert open_run(only_run(here)).status()["state"] == "failed"


def test_resume_goes_on_in_the_same_folder(train: Train, here: Path) -> None:
    train("job.toml", ranks="raise")
    run = only_run(here)
    first_s = json.loads((run / "launch.json").read_text())["launched"]
    code, out, err = train("--resume", str(run))
    assert code == 0, err
    assert only_run(here) == run
    launches = open_run(run).launches()
    assert len(launches) == 2
    assert launches[0] == first_s
    assert f"{run}: done, 10 of 10 steps" in out
    assert not (run / "plan-1.json").exists(), "the plan is the same"


def test_resume_may_change_the_layout(train: Train, failed: Path) -> None:
    run = failed
    before = json.loads((run / "plan.json").read_text())
    code, _, err = train("--resume", str(run), "--set", "parallel.tensor=2", "--cluster", "local-cpu:2", "--dry-run")
    assert code == 0, err
    code, _, err = train("--resume", str(run), "--set", "parallel.tensor=2")
    assert code == 0, err
    after = json.loads((run / "plan.json").read_text())
    assert (before["layout"]["tensor"], after["layout"]["tensor"]) == (1, 2)
    assert json.loads((run / "plan-1.json").read_text()) == before


def test_resume_on_three_ranks_pads_the_batch_as_a_shrink_does(train: Train, here: Path) -> None:
    fixed = [text for name in ("tensor", "context", "pipeline") for text in ("--set", f"parallel.{name}=1")]
    train("job.toml", *fixed, "--set", "batch.micro=2", ranks="train")
    on_three = ("--resume", str(only_run(here)), "--steps", "20", "--cluster", "local-cpu:3", "--dry-run")
    code, _, err = train(*on_three)
    assert code == 0, err
    assert "continues with 3 data ranks, and its batch is padded with 4 rows" in err
    code, _, err = train(*on_three, "--set", "batch.micro=1")
    assert code == 2, "a split of one's own is taken as written"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.layers=2", "model.layers = 2 cannot replace 4 in a resumed run"),
        ("data.seed=5", "data.seed = 5 cannot replace 0 in a resumed run"),
        ("batch.global_tokens=4096", "batch.global_tokens = 4096 cannot replace 2048 in a resumed run"),
        ("optim.name=muon", "optim.name = 'muon' cannot replace 'adamw' in a resumed run"),
    ],
)
def test_resume_refuses_another_model_or_other_data(train: Train, failed: Path, override: str, told: str) -> None:
    code, out, err = train("--resume", str(failed), "--set", override)
    assert (code, out) == (2, "")
    assert f"{failed}: {told}\n  the checkpoint would not match, or the data would change\n  start a new run" in err


def test_resume_warns_where_the_curve_bends(train: Train, failed: Path) -> None:
    code, _, err = train("--resume", str(failed), "--set", "optim.lr=1e-4")
    assert code == 0
    assert "optim.lr = 0.0001 instead of 0.0003: the loss curve changes from here on" in err


def test_resume_without_a_checkpoint(train: Train, here: Path) -> None:
    train("job.toml", ranks="finish")
    run = only_run(here)
    code, _, err = train("--resume", str(run))
    assert code == 2
    assert err.startswith(f"{run}: has no checkpoint to resume from\n  start it again: phalanx train {run}/job.toml\n")


def test_resume_of_a_finished_run(train: Train, here: Path) -> None:
    train("job.toml")
    run = only_run(here)
    code, out, err = train("--resume", str(run))
    assert (code, out) == (2, "")
    assert err.startswith(f"{run}: is finished: all 10 steps are done\n  continue with --steps N above 10; ")
    assert train("--resume", str(run), "--steps", "20", "--dry-run")[0] == 0


def test_ranks_share_the_cores_and_stay_on_this_machine(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    where: list[str] = []

    def launch(
        run: object, *, hosts: Sequence[client.HostSpec], environ: dict[str, str], **_: object
    ) -> client.LaunchOutcome:
        seen.update(environ)
        where.extend(host.address for host in hosts)
        return client.LaunchOutcome(state="failed", exit_code=3, message="x")

    train("job.toml", "--dry-run")
    monkeypatch.setattr(client, "launch", launch)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main(["train", "job.toml"]) == 3
    assert int(seen["OMP_NUM_THREADS"]) >= 1
    assert where == ["127.0.0.1"], "gloo and NCCL are told the interface of this address"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert main(["train", "job.toml"]) == 3
    assert seen["OMP_NUM_THREADS"] == "7", "what a person set is kept"


def test_a_plan_made_before(train: Train, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.toml", "--set", "parallel.tensor=2", "--out", "plan.json"]) == 0
    capsys.readouterr()
    code, _, err = train("--plan", "plan.json")
    assert code == 0, err
    assert json.loads((only_run(here) / "plan.json").read_text())["layout"]["tensor"] == 2
    code, _, err = train("job.toml", "--plan", "plan.json")
    assert code == 2
    assert err.startswith("plan.json: is the plan of another job: parallel.tensor differ from job.toml\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "phalanx train: no job file is named\n"),
        (["job.toml", "--resume", "x"], "phalanx train: JOB and --resume exclude each other\n"),
        (["job.toml", "--steps", "-1"], "phalanx train: --steps -1 is below 1\n"),
        (["--resume", "nothing"], "nothing: there is no such run\n"),
        (["job.toml", "--name", "../x"], "run name: '../x' is not a name\n"),
        (["job.toml", "--cluster", "8xH100:2"], "the plan needs 16 × H100-80GB-SXM, but this machine has"),
        (["job.toml", "--plan", "p", "--steps", "1"], "phalanx train: --plan is already settled"),
        (["job.toml", "--set", "data.path=gone"], "--set data.path=gone: there is no folder gone\n"),
        (["job.toml", "--set", "data.path=[]"], "data: names neither a path nor a corpus\n"),
        (["job.toml", "--set", "model.vocab=256"], "data has a vocabulary of 300, larger than the model's 256\n"),
        (["job.toml", "--set", "parallel.tensor=3"], "parallel.tensor = 3"),
        (["job.toml", "--set", "train.weights=gone"], "--set train.weights=gone: there is no folder {here}/gone\n"),
        (["job.toml", "--set", "train.weights=empty"], "{here}/empty: has neither model.safetensors nor"),
        (
            ["job.toml", "--allow-code", "--set", "model.module=gone.py:build"],
            '--set model.module=gone.py:build: "{here}/gone.py:build": there is no file {here}/gone.py\n',
        ),
        (["job.toml", "--runs", "job.toml"], "--runs job.toml: job.toml is a file\n  the run could not be recorded\n"),
        (["job.toml", "--runs", "/proc/x", "--set", "checkpoint.path=s3://b/p"], "--runs /proc/x: /proc cannot be"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_starts(train: Train, here: Path, arguments: list[str], told: str) -> None:
    """With --dry-run and without: a dry run that finds nothing wrong promises that the start finds nothing either."""
    (here / "empty").mkdir()
    for mode in ([], ["--dry-run"]):
        code, out, err = train(*arguments, *mode)
        assert (code, out) == (2, ""), mode
        assert told.format(here=here) in err, mode
    assert not (here / "runs").exists() or not list((here / "runs").iterdir())


@pytest.mark.parametrize("option", [["--hosts", "2"], ["--spares", "1"], ["--join", "2"], ["--address", "10.0.0.1"]])
def test_what_belongs_to_the_launcher_is_refused_under_one(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    for name, value in {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    code, _, err = train("job.toml", *option)
    assert code == 2
    told = f"{option[0]} has no effect: Open MPI started 2 processes, and each is one rank\n"
    assert err.startswith(f"phalanx train: {told}")
    assert not (here / "runs").exists()


def test_weights_of_another_tokenizer_are_refused_by_every_verb(
    train: Train, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of the data that mean other words to the weights: plan, check, a dry run and the start say the same."""
    (here / "other").mkdir()
    found = json.loads((here / "data" / "tokenizer.json").read_text())
    words = found["model"]["vocab"]
    first, second = (word for word, number in words.items() if number in (40, 41))
    words[first], words[second] = words[second], words[first]
    (here / "other" / "tokenizer.json").write_text(json.dumps(found))
    told = (
        f"--set train.weights=other: {here / 'other'} has another tokenizer than the data in {here / 'data'}: "
        "2 of 300 tokens differ, e.g. id 40:"
    )
    for verb in (["plan"], ["check"], ["train", "--dry-run"], ["train"]):
        assert main([*verb, "job.toml", "--set", "train.weights=other"]) == 2, verb
        err = capsys.readouterr().err.replace(": other has", f": {here / 'other'} has")
        assert told in err.replace("the data in data:", f"the data in {here / 'data'}:"), verb
    assert not (here / "runs").exists()


def test_repeated_data_and_idle_vocabulary_are_said_by_every_verb(
    train: Train, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--set", "model.vocab=4096", "--set", "data.tokens=2048000"]
    for verb in (["plan"], ["check"], ["train", "--dry-run"]):
        assert main([*verb, "job.toml", *changes]) in (0, 1), verb
        said = " ".join("".join(capsys.readouterr()).split())
        assert re.search(r"2\.05M tokens are 2\d\d passes over [\d.]+k tokens of data", said), verb
        assert re.search(r"the model has 4,096 tokens, and \S*data uses 300 of them: 486k parameters", said), verb


def test_a_truncated_shard(train: Train, here: Path, data: Path) -> None:
    (here / "data").unlink()
    (here / "data").mkdir()
    for path in data.iterdir():
        (here / "data" / path.name).write_bytes(path.read_bytes())
    shard = next(path for path in (here / "data").iterdir() if path.suffix == ".bin")
    shard.write_bytes(shard.read_bytes()[:-2])
    code, _, err = train("job.toml")
    assert code == 2
    assert "is truncated: " in err


def test_missing_torch_names_the_extra(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.train import prepare

    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    code, _, err = train("job.toml")
    assert code == 2
    assert err == (
        "phalanx train: needs torch and safetensors, which are not installed\n  pip install 'phalanx[train]'\n"
    )


def test_code_of_a_job_needs_a_word(train: Train, here: Path) -> None:
    (here / "net.py").write_text("def build(shape): ...\n")
    code, _, err = train("job.toml", "--set", "model.module=net.py:build", "--dry-run")
    assert code == 2
    assert f"model.module: '{here / 'net.py'}:build' is code that this job wants to run\n" in err
    assert train("job.toml", "--set", "model.module=net.py:build", "--dry-run", "--allow-code")[0] == 0


def test_help_imports_nothing_heavy() -> None:
    code = "\n".join(
        [
            "import contextlib, sys",
            "from phalanx.cli.main import main",
            "with contextlib.suppress(SystemExit):",
            "    main(['train', '--help'])",
            "print([name for name in ('numpy', 'torch', 'rich') if name in sys.modules])",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- several hosts, and where checkpoints go -------------------------------------------------------------------------


def test_a_first_host_that_nobody_could_reach_is_refused(train: Train, here: Path) -> None:
    code, _, err = train("job.toml", "--join", "2")
    assert code == 2
    assert err.endswith(
        "phalanx train: --join 2 without --address\n"
        "  this host would listen at 127.0.0.1, where no other host reaches it\n"
        "  --address with an address of this host that the others reach; --address 127.0.0.1 to try it on one machine\n"
    )
    code, _, err = train("job.toml", "--address", "10.0.0.1")
    assert (code, "--address 10.0.0.1 without --join has no effect" in err) == (2, True)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{here}/away/checkpoints", "there is no folder {here}/away\n  is its disk mounted?\n"),
        ("{here}/job.toml", "{here}/job.toml is a file\n"),
        ("/proc/checkpoints", "/proc cannot be written: "),
    ],
)
def test_checkpoints_that_could_not_be_written_are_refused_first(
    train: Train, here: Path, path: str, said: str
) -> None:
    path = path.format(here=here)
    code, _, err = train("job.toml", "--set", f"checkpoint.path={json.dumps(path)}")
    assert code == 2
    assert f"checkpoint.path = {path!r}: {said.format(here=here)}" in err
    assert not (here / "runs").exists()
