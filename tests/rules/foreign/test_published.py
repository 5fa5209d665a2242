"""Configurations as other trainers publish them: what they become, that they plan, and that no setting is lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from phalanx.job.load import load
from phalanx.job.run_sections import ClusterChoice
from phalanx.plan.make import make_plan
from phalanx.rules.foreign.convert import ConvertedConfig, convert_config, split_variables
from phalanx.rules.foreign.detect import trainer_of_file
from phalanx.rules.foreign.readers import TRAINERS

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A file, what the caller adds, and what must come of it."""

    file: str
    trainer: str
    cluster: str
    layout: str
    settings: tuple[str, ...] = ()


CASES = (
    Published(
        file="ms-swift_qwen3_8b.sh",
        trainer="ms-swift",
        cluster="8xH100:1",
        layout="TP2·CP1·PP1·DP4 (ZeRO-1, EP1) mbs2 selective",
    ),
    Published(
        file="transformers_llama2_7b.sh",
        trainer="transformers",
        cluster="8xA100:1",
        layout="TP1·CP1·PP1·DP8 (ZeRO-2, EP1) mbs4 full",
    ),
    Published(
        file="torchtitan_llama3_8b.toml",
        trainer="torchtitan",
        cluster="8xH100:8",
        layout="TP1·CP1·PP1·DP64 (ZeRO-3, EP1) mbs1 selective",
    ),
    Published(
        file="torchtitan_llama3_405b.toml",
        trainer="torchtitan",
        cluster="8xH100:16",
        layout="TP8·CP1·PP1·DP16 (ZeRO-3, EP1) mbs2 full",
    ),
    Published(
        file="megatron_gpt3_175b.sh",
        trainer="megatron",
        cluster="8xA100:128",
        layout="TP8·CP1·PP16·DP8 (ZeRO-0, EP1) mbs1 no-recompute",
    ),
    Published(
        file="megatron_llama3_8b.txt",
        trainer="megatron",
        cluster="8xH100:1",
        layout="TP2·CP1·PP1·DP4 (ZeRO-1, EP1) mbs1 no-recompute",
    ),
    Published(
        file="deepspeed_zero2.json",
        trainer="deepspeed",
        cluster="8xA100:8",
        settings=("model.preset=llama-2-7b",),
        layout="TP1·CP1·PP1·DP64 (ZeRO-2, EP1) mbs4 selective offload-optimizer",
    ),
    Published(
        file="deepspeed_zero3_auto.json",
        trainer="deepspeed",
        cluster="8xA100:8",
        settings=("model.preset=llama-2-7b", "batch.global_sequences=512", "batch.micro=1"),
        layout="TP1·CP1·PP1·DP64 (ZeRO-3, EP1) mbs1 selective",
    ),
    Published(
        file="accelerate_fsdp2.yaml",
        trainer="accelerate",
        cluster="8xH100:2",
        settings=("model.preset=llama-3-8b", "batch.global_sequences=128", "batch.micro=2"),
        layout="TP1·CP1·PP1·DP16 (ZeRO-3, EP1) mbs2 full",
    ),
    Published(
        file="accelerate_nd.yaml",
        trainer="accelerate",
        cluster="8xH100:4",
        settings=("model.preset=llama-3-8b", "batch.global_sequences=128", "batch.micro=1"),
        layout="TP2·CP2·PP1·DP8 (ZeRO-3/8, EP1) mbs1 no-recompute",
    ),
    Published(
        file="accelerate_deepspeed.yaml",
        trainer="accelerate",
        cluster="8xH100:1",
        settings=("model.preset=llama-3-8b", "batch.global_sequences=64"),
        layout="TP1·CP1·PP1·DP8 (ZeRO-3, EP1) mbs2 full",
    ),
    Published(
        file="nemo1_llama2_70b.yaml",
        trainer="nemo",
        cluster="8xH100:32",
        settings=("model.vocab=32000",),
        layout="TP4·CP1·PP4·VPP5·DP16 (ZeRO-1, EP1) mbs1 selective",
    ),
    Published(
        file="nemo2_llama3_8b.yaml",
        trainer="nemo",
        cluster="8xH100:4",
        layout="TP1·CP2·PP1·DP16 (ZeRO-1, EP1) mbs1 no-recompute",
    ),
    Published(
        file="bridge_deepseek_v3.yaml",
        trainer="nemo",
        cluster="8xH100:128",
        layout="TP2·CP1·PP8·VPP4·DP64 (ZeRO-1, EP64) mbs1 selective",
    ),
    Published(
        file="nanotron_llama_8b.yaml",
        trainer="nanotron",
        cluster="8xH100:8",
        layout="TP4·CP1·PP2·DP8 (ZeRO-1, EP1) mbs1 no-recompute",
    ),
    Published(
        file="gpt-neox_20b.yml",
        trainer="gpt-neox",
        cluster="8xA100:12",
        layout="TP2·CP1·PP4·DP12 (ZeRO-1, EP1) mbs4 full",
    ),
    Published(
        file="axolotl_llama3_8b.yaml",
        trainer="axolotl",
        cluster="8xH100:1",
        layout="TP1·CP1·PP1·DP8 (ZeRO-3, EP1) mbs1 full",
    ),
    Published(
        file="llama-factory_llama3_8b.yaml",
        trainer="llama-factory",
        cluster="8xH100:1",
        layout="TP1·CP1·PP1·DP8 (ZeRO-2, EP1) mbs1 full",
    ),
    Published(
        file="bridge_override.yaml",
        trainer="nemo",
        cluster="8xH100:1",
        settings=("model.preset=llama-3-8b",),
        layout="TP1·CP1·PP1·DP8 (ZeRO-3, EP1) mbs1 no-recompute",
    ),
    Published(
        file="torchtitan_config_registry.py",
        trainer="torchtitan",
        cluster="8xH100:16",
        settings=("recipe=llama3_405b",),
        layout="TP8·CP1·PP1·DP16 (ZeRO-3, EP1) mbs2 full",
    ),
    Published(
        file="olmo-core_7b.py",
        trainer="olmo-core",
        cluster="8xH100:16",
        layout="TP1·CP1·PP1·DP128 (ZeRO-3, EP1) mbs2 no-recompute",
    ),
    Published(
        file="bridge_recipe.py",
        trainer="nemo",
        cluster="8xH100:16",
        layout="TP4·CP2·PP4·DP4 (ZeRO-1, EP1) mbs1 no-recompute",
    ),
    Published(
        file="nemo2_recipe.py",
        trainer="nemo",
        cluster="8xH100:16",
        layout="TP1·CP2·PP1·DP64 (ZeRO-1, EP1) mbs1 no-recompute",
    ),
)
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)


@cache
def converted(case: Published) -> ConvertedConfig:
    return convert_config(DATA / case.file, case.trainer, cluster=case.cluster, overrides=case.settings)


def test_every_file_of_the_folder_is_a_case() -> None:
    assert {case.file for case in CASES} == {path.name for path in DATA.iterdir() if path.is_file()}
    assert {case.trainer for case in CASES} == set(TRAINERS)


@each
def test_it_is_recognised_by_its_content(case: Published) -> None:
    assert trainer_of_file(DATA / case.file) == case.trainer


@each
def test_it_becomes_the_layout_it_says(case: Published) -> None:
    found = converted(case)
    assert found.missing == ()
    assert make_plan(found.resolved, case.cluster).layout.name == case.layout


@each
def test_every_leaf_ends_in_exactly_one_list(case: Published) -> None:
    found = converted(case)
    lists = [
        [key for key, _ in found.mapped],
        [key for key, _ in found.irrelevant],
        [one.key for one in found.unmapped],
    ]
    told = [key for keys in lists for key in keys]
    variables = split_variables(case.settings)[0]
    assert sorted(told) == sorted(TRAINERS[case.trainer].read(DATA / case.file, variables).leaves)
    assert len(set(told)) == len(told)


@each
def test_every_reason_is_in_words(case: Published) -> None:
    found = converted(case)
    assert all(why for _, why in found.irrelevant)
    assert all(one.why for one in found.unmapped)
    # A leaf is mapped to a key of the job, to a habit of the trainer, or to the size of the cluster.
    for _, where in found.mapped:
        assert where.startswith(("practice: ", "cluster")) or where.partition(" ")[0].rstrip(":").count(".") == 1, where


@each
def test_the_job_file_says_the_same_job(case: Published, tmp_path: Path) -> None:
    found = converted(case)
    path = tmp_path / "job.toml"
    path.write_text(found.text, encoding="utf-8")
    loaded = load(path).job
    assert replace(loaded, cluster=ClusterChoice()) == replace(found.resolved.job, cluster=ClusterChoice())
    assert loaded.cluster.target == case.cluster
    for one in found.unmapped:
        assert f"#   {one.key} = " in found.text


@each
def test_findings_point_into_the_file_itself(case: Published) -> None:
    found = converted(case)
    lines = (DATA / case.file).read_text(encoding="utf-8").splitlines()
    places = [origin.where for origin in found.resolved.origins.values() if origin.where.startswith(f"{DATA}/")]
    numbers = [int(place.rpartition(":")[2]) for place in places if place.rpartition(":")[2].isdigit()]
    assert numbers
    assert all(1 <= number <= len(lines) for number in numbers)
    for place in places:
        if place.rpartition(":")[2].isdigit():
            assert lines[int(place.rpartition(":")[2]) - 1].strip()
