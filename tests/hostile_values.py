"""Hostile values for everything that takes a count or a number, and the child process that drives them under limits.

Run as a program with a folder and the name of a table, it prints a JSON object per call that did not end with exit
code 2 and a short message on the value. `subprocess.Popen` is replaced: a call that gets so far was not refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CPU_S = 5  # of one call
CHILD_CPU_S = 90  # of all calls of a table; they take 5 to 10
MEMORY_BYTES = 6 * 2**30
MAX_MESSAGE = 4000  # characters

HUGE = "9" * 400  # beyond the largest float, and longer than a file name may be
COUNTS = (HUGE, "1" + "0" * 15, "-1")
SEEDS = (HUGE, "-1")
NUMBERS = ("nan", "inf", "-1", "1e300")
PATHS = (HUGE, "x/" * 3000, "loop", "loop/job.toml")
IN_FILES = (HUGE, "1000000000000000000000", "1e30", "-1", "inf", "nan", "true", '"many"', "[1]", "{}")

EXAMPLES = Path(__file__).parents[1] / "examples"
JOB, DRILL = str(EXAMPLES / "llama-3-8b-64xH100.toml"), str(EXAMPLES / "drill.toml")

COUNT_CALLS = """
plan JOB --top {}
cluster local --ranks {}
cluster {}xH100:2
cluster 8xH100:{}
cluster H100:{}
cluster local:{}
sim JOB --days 1 --runs {}
sim JOB --days 1 --planes {}
sim --queue synthetic --jobs {} --cluster 8xH100:4
fabric design --gpus {}
fabric design --gpus 64 --tiers {}
fabric design --gpus 64 --planes {}
fabric design --gpus 64 --rails {}
fabric design --gpus 64 --top {}
fabric design --gpus 64 --switch {}x100G
fabric decisions --gpus {}
fabric decisions --gpus 1024 --planes {}
fabric decisions --gpus 1024 --paths {}
fabric show clos2:{}x800G/8p/512
fabric show clos2:1024x800G/{}p/512
fabric show clos2:1024x800G/8p/{}
fabric show clos{}:1024x800G/8p/512
fabric simulate clos2:{}x800G/8p/512
fabric simulate clos2:64x800G/8p/512 --paths {}
fabric simulate clos2:64x800G/8p/512 --traffic incast:{}
fabric simulate clos2:64x800G/8p/512 --fail nic:0/{}
fabric export clos2:{}x800G/8p/512 --topo a.topo
scale sweep DRILL --budgets 1e9 --sizes {} --dry-run
scale sweep DRILL --budgets 1e12..1e14:{} --dry-run
evolve schedules --stages {}
evolve schedules --micro-batches {}
evolve schedules --evaluations {}
evolve plans JOB --evaluations {}
evolve plans JOB --most-inner-steps {}
evolve plans JOB --memory {}
train DRILL --steps {}
train DRILL --hosts {}
train DRILL --spares {}
train DRILL --ranks-per-gpu {}
peers start DRILL --steps {}
drill DRILL --peers {}
drill DRILL --steps {}
drill DRILL --hosts {}
drill DRILL --spares {}
drill DRILL --fault kill:rank={},step=2
drill DRILL --fault kill:rank=0,step={}
verify DRILL --steps {}
trace DRILL --rank {}
trace DRILL --workers {}
launch DRILL --on slurm --steps {} --dry-run
launch DRILL --on slurm --spares {} --dry-run
"""
SEED_CALLS = """
sim JOB --days 1 --seed {}
sim --queue synthetic --seed {} --cluster 8xH100:4
fabric simulate clos2:64x800G/8p/512 --seed {}
evolve schedules --seed {}
drill DRILL --chaos --seed {}
"""
NUMBER_CALLS = """
sim JOB --days {}
sim JOB --break link --outage {}
sim JOB --days 1 --weibull {}
sim JOB --days 1 --planned-per-day {}
sim JOB --days 1 --repair-hours {}
sim --queue synthetic --days {} --cluster 8xH100:4
sim --queue synthetic --load {} --cluster 8xH100:4
fabric design --gpus 64 --nic-gbps {}
fabric design --gpus 64 --oversubscription {}
fabric design --gpus 64 --years {}
fabric design --gpus 64 --recovery-s {}
fabric decisions --gpus 64 --nic-gbps {}
fabric decisions --gpus 64 --recovery-s {}
fabric simulate clos2:64x800G/8p/512 --fail t0:0/0 --left {}
fabric simulate clos2:64x800G/8p/512 --converge {}
fabric simulate clos2:64x800G/8p/512 --cpu {}
scale sweep DRILL --budgets {} --dry-run
scale sweep DRILL --budgets 1e9 --spread {} --dry-run
evolve schedules --weight-share {}
evolve plans JOB --links {}
drill DRILL --minutes {}
drill DRILL --fault kill:rank=0,at_s={}
verify DRILL --timeout {}
probe --seconds {}
"""
PATH_CALLS = """
plan {}
check {}
show {}
import {}
report {}
diff {} JOB
checkpoints {}
export {} --out here
calibrate {} --out here.json
backtest {}
scale fit {}
scale predict {} --params 1e9 --tokens 1e9
sim JOB --fabric {}
fabric show {}.toml
cluster ./{}
cluster --list --hardware {}
data show {}
check JOB --waivers {}
check JOB --plan {}
watch {}
"""
WRITE_CALLS = """
init {}
plan JOB --out {}
schema --out {}
check JOB --out {}/report.txt
"""
JOB_FILE = """name = "x"
[model]
preset = "llama-3-8b"
{model}
[data]
tokens = "1B"
{data}
[batch]
global_sequences = 64
{batch}
{section}
[cluster]
spec = "8xH100:2"
"""
CLUSTER_FILE = """accelerator = "H100"
domains = {domains}
domain_devices = {domain_devices}
host_devices = {host_devices}
host_memory_gib = {host_memory_gib}
"""
CLUSTER_VALUES = {"domains": "2", "domain_devices": "8", "host_devices": "8", "host_memory_gib": "2048"}
MEGATRON = (
    "torchrun --nproc_per_node {nproc} --nnodes 2 pretrain_gpt.py --num-layers {layers} --hidden-size {hidden} "
    "--num-attention-heads {heads} --seq-length {sequence} --max-position-embeddings 4096 --micro-batch-size {micro} "
    "--global-batch-size {batch} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
    "--train-iters 1000 --vocab-size {vocab} --num-experts {experts} --lr 1e-4\n"
)
MEGATRON_VALUES = {
    "nproc": "8", "layers": "32", "hidden": "4096", "heads": "32", "sequence": "4096", "micro": "1", "batch": "128",
    "tensor": "2", "pipeline": "2", "vocab": "32000", "experts": "8",
}  # fmt: skip
HF_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
HF_COUNTS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")

Call = tuple[list[str], str]  # arguments, and the hostile value in them


def option_calls() -> Iterator[Call]:
    """Counts, seeds and numbers of the command line."""
    for calls, values in ((COUNT_CALLS, COUNTS), (SEED_CALLS, SEEDS), (NUMBER_CALLS, NUMBERS)):
        for line in calls.strip().splitlines():
            for value in values:
                yield arguments(line, value), value


def path_calls() -> Iterator[Call]:
    """Paths that no file can have, where a file or folder is named."""
    Path("loop").symlink_to("loop")
    for line in PATH_CALLS.strip().splitlines():
        for value in PATHS:
            yield arguments(line, value), value
    for line in WRITE_CALLS.strip().splitlines():
        yield arguments(line, HUGE), HUGE


def arguments(line: str, value: str) -> list[str]:
    names = {"JOB": JOB, "DRILL": DRILL}
    return [names.get(word, word).replace("{}", value) for word in line.split()]


def file_calls() -> Iterator[Call]:
    """Counts in files: of a job, of a cluster, and of other trainers."""
    for value in IN_FILES:
        for name in job_counts():
            section, _, key = name.partition(".")
            parts = dict.fromkeys(("model", "data", "batch", "section"), "")
            text = f"{key} = {value}"
            parts |= {section: text} if section in ("model", "data", "batch") else {"section": f"[{section}]\n{text}"}
            Path("job.toml").write_text(JOB_FILE.format(**parts))
            yield ["show", "job.toml"], value
        for name in CLUSTER_VALUES:
            Path("cluster.toml").write_text(CLUSTER_FILE.format(**{**CLUSTER_VALUES, name: value}))
            yield ["cluster", "./cluster.toml"], value
    for value in (HUGE, "1000000000000000000000", "1e30", "inf", "nan"):
        for name in MEGATRON_VALUES:
            if name != "nproc":
                Path("train.sh").write_text(MEGATRON.format(**{**MEGATRON_VALUES, name: value}))
                yield ["check", "train.sh"], value
    for name in ("layers", "hidden", "heads", "vocab", "experts", "nproc"):
        Path("train.sh").write_text(MEGATRON.format(**{**MEGATRON_VALUES, name: "1" + "0" * 12}))
        yield ["import", "train.sh"], "1" + "0" * 12
    Path("hf.toml").write_text(
        JOB_FILE.format(model="", data="", batch="", section="").replace(
            'preset = "llama-3-8b"', 'hf_config = "config.json"'
        )
    )
    for value in (HUGE, "1000000000000", "1e30", "-1", "0", "true", "[1]", '"many"', "Infinity", "NaN"):
        for name in HF_COUNTS:
            config = json.dumps({**HF_CONFIG, name: "VALUE"}).replace('"VALUE"', value)
            Path("config.json").write_text(config)
            yield ["plan", "hf.toml"], value


def job_counts() -> Iterator[str]:
    """Every key of a job whose rule is a count."""
    from dataclasses import fields

    from phalanx.job.key_rules import rule_of
    from phalanx.job.model_section import shape_rules
    from phalanx.job.schema import SECTIONS

    yield from (f"model.{name}" for name, rule in shape_rules().items() if "whole number" in rule.expects)
    for section, kind in SECTIONS.items():
        if section == "cluster":
            continue
        for item in fields(kind):
            rule = rule_of(item.metadata) if "rule" in item.metadata else None
            given = f"{section}.{(rule.key if rule else '') or item.name}"
            if rule is not None and "whole number" in rule.expects and given not in TAKEN:
                yield given


TAKEN = ("data.tokens", "batch.global_sequences")  # stand in the template
TABLES = {"options": option_calls, "paths": path_calls, "files": file_calls}


class TooLong(BaseException):
    """A call took more processor time than it may."""


class Started(BaseException):
    """A call went so far as to start a process."""


def interrupt(*_: object) -> None:
    raise TooLong


def refuse_process(*_: object, **__: object) -> None:
    raise Started


def outcome(call: list[str]) -> tuple[object, str]:
    """The exit code of a command, or the exception that ended it; and what it wrote to stderr."""
    from phalanx.cli.main import main

    err = io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            return main(call), err.getvalue()
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}", err.getvalue()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(folder: Path, table: str) -> None:
    """Drive a table in a folder; print what was not refused as it should, and then a summary."""
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, interrupt)
    subprocess.Popen.__init__ = refuse_process  # type: ignore[method-assign,assignment]
    calls = 0
    for call, value in TABLES[table]():
        code, err = outcome(call)
        calls += 1
        if code != 2 or "internal error" in err or not 0 < len(err) <= MAX_MESSAGE:
            shown = " ".join(call).replace(value, value[:16])
            print(json.dumps({"call": shown, "value": value[:16], "code": code, "err": err[:300]}), flush=True)
    print(json.dumps({"calls": calls, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
