"""The reader of other trainers' files on generated ones: it returns or refuses in a sentence, within its CPU limit."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpu_limits import CpuLimitExceededError, cpu_limit
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from phalanx.api.jobs import import_job
from phalanx.errors import PhalanxError
from phalanx.rules.foreign.config_files import read_tree
from phalanx.rules.foreign.shell.training_command import read_script

CPU_S = 5.0  # of one file; the largest of the corpus takes 0.1
MAX_MESSAGE = 40_000  # characters: a hundred problems, each cut

NUMBERS = st.one_of(
    st.integers(-3, 200).map(str),
    st.sampled_from(
        ["9" * 400, "1e9", "1e400", "inf", "nan", "-1", "0", "0x10", "1_000", "true", "", "2**31", "$((1<<60))"]
    ),
)
FLAGS = st.sampled_from(
    [
        "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings",
        "--micro-batch-size", "--global-batch-size", "--tensor-model-parallel-size", "--pipeline-model-parallel-size",
        "--context-parallel-size", "--num-experts", "--vocab-size", "--train-iters", "--rampup-batch-size",
        "--num-layers-per-virtual-pipeline-stage", "--lr", "--save-interval", "--swiglu", "--deepspeed",
    ]
)  # fmt: skip
SHELL = st.sampled_from(
    [
        "for i in {1..1000000000}; do X=$X$X; done", "while true; do A+=( $A ); done", "TP=$((TP*TP))",
        "f() { f; f; }; f", "ARGS=($ARGS $ARGS)", 'eval "$ARGS"', "if [ -f x ]; then", "fi", "case $1 in", "esac",
        "X=${X//a/aa}", "cat <<EOF", "EOF", "export N=$(seq 1 1000000000)", ". ./train.sh", "}", "((", '"', "`",
    ]
)  # fmt: skip
COMMAND = st.lists(st.tuples(FLAGS, NUMBERS).map(" ".join), max_size=12).map(
    lambda words: " ".join(["torchrun --nproc_per_node 8 pretrain_gpt.py", *words])
)
SCRIPTS = st.lists(st.one_of(SHELL, COMMAND, st.text(max_size=30)), max_size=8).map("\n".join)
KEYS = st.sampled_from(
    [
        "model", "training", "parallelism", "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
        "stage", "num_layers", "hidden_size", "seq_len", "steps", "tensor_parallel_degree", "trainer", "num_nodes",
        "devices", "global_batch_size", "name", "flavor", "reduce_bucket_size", "optimizer", "lr",
    ]
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from([10**400, -1, 1e30])
)
VALUES = st.recursive(LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner)))
TREES: st.SearchStrategy[Any] = st.dictionaries(KEYS, VALUES, max_size=8)


def refusal_of(read: Callable[[], object]) -> str:
    """The message of the PhalanxError that a reading ends with, if it does."""
    try:
        read()
    except PhalanxError as error:
        return str(error)
    return ""


def read_all(name: str, text: str, trainers: tuple[str, ...]) -> None:
    """Read one file in every way; any exception but a PhalanxError fails."""
    with tempfile.TemporaryDirectory() as folder, cpu_limit(CPU_S):
        path = Path(folder) / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        readings = [lambda trainer=trainer: import_job(path, trainer=trainer) for trainer in trainers]
        readings.append((lambda: read_script(path, {})) if name.endswith(".sh") else (lambda: read_tree(path)))
        for read in readings:
            try:
                message = refusal_of(read)
            except CpuLimitExceededError:
                pytest.fail(f"more than {CPU_S:g} s of processor time for {text!r}")
            assert len(message) <= MAX_MESSAGE


@settings(max_examples=60, derandomize=True, phases=[Phase.generate])
@given(SCRIPTS)
def test_a_generated_script_is_read_or_refused(text: str) -> None:
    read_all("train.sh", text, ("megatron", ""))


@settings(max_examples=60, derandomize=True, phases=[Phase.generate])
@given(TREES, st.sampled_from([".json", ".yaml"]))
def test_a_generated_configuration_is_read_or_refused(tree: object, ending: str) -> None:
    read_all(f"config{ending}", json.dumps(tree), ("deepspeed", "nemo", ""))


def spin() -> None:
    while True:
        os.getpid()


def test_the_limit_ends_a_reader_that_does_not_end() -> None:
    with cpu_limit(0.05), pytest.raises(CpuLimitExceededError):
        spin()


def test_a_script_that_sources_itself_three_times_ends() -> None:
    """Every source was one step of the interpreter, though the file is looked up, read and parsed for each."""
    read_all("train.sh", ". ./train.sh\n. ./train.sh\n. ./train.sh", ("megatron", ""))
