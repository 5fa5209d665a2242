"""Which framework profile a name means, and the shipped constants."""

import math
from dataclasses import fields

import numpy as np
import pytest

from phalanx.plan.memory_profile import memory_profiles
from phalanx.plan.physics import (
    PROFILE_FIELDS,
    Physics,
    Profile,
    profile_name,
    shipped_physics,
    shipped_profiles,
    stack_profiles,
)

SHARES = (
    "sustained",
    "throttled",
    "fp8",
    "fp4",
    "grouped",
    "flash_lag",
    "memory",
    "selective",
    "link",
    "nic",
    "pacing",
)


@pytest.mark.parametrize(
    ("framework", "version", "profile"),
    [
        ("megatron-lm", "2021-04", "megatron-lm"),
        ("megatron-lm", "2022", "megatron-lm"),
        ("megatron-lm", "2024-03", "megatron-core"),  # Megatron-LM runs on Megatron-Core since 2023
        ("megatron-lm", "", "megatron-lm"),
        ("Megatron-DeepSpeed", "2022", "megatron-deepspeed"),
        ("gpt-neox", "", "megatron-deepspeed"),
        ("DeepSpeed ZeRO-3", "", "deepspeed"),
        ("nemo-megatron", "2025-05", "megatron-core"),
        ("megatron-bridge", "26.06", "megatron-bridge"),
        ("megatron-bridge", "25.09", "megatron-core"),
        ("torchtitan", "", "torchtitan"),
        ("PyTorch FSDP", "", "torchtitan"),
        ("composer-fsdp", "2023-2024", "composer-fsdp"),
        ("nanotron", "", "nanotron"),
        ("  NANOTRON ", "", "nanotron"),
        ("maxtext", "", "default"),
        ("my own trainer", "2030", "default"),
        ("", "", "default"),
        ("", "not a date", "default"),
    ],
)
def test_profile_by_name_and_date(framework, version, profile):
    assert profile_name(framework, version) == profile


def test_every_name_leads_to_a_shipped_profile():
    names = {
        profile_name(word, version) for word in ("megatron", "bridge", "zero", "fsdp", "x") for version in ("", "2026")
    }
    assert names <= set(shipped_profiles())
    assert set(shipped_profiles()) == set(memory_profiles())


def test_shipped_constants_are_physical():
    for field in fields(Physics):
        value = getattr(shipped_physics(), field.name)
        assert math.isfinite(value), field.name
        assert value > 0, field.name
    for name in SHARES:
        assert getattr(shipped_physics(), name) <= 1.0, f"{name} is a share of a peak"


@pytest.mark.parametrize("name", list(shipped_profiles()))
def test_shipped_profiles_are_physical(name):
    profile = shipped_profiles()[name]
    for field in PROFILE_FIELDS:
        assert getattr(profile, field) >= 0, field
    assert 0.5 < profile.gemm < 1.5  # a framework changes matmuls by a little, never by a factor
    for overlap in ("data_overlap", "scatter_overlap", "gather_overlap"):
        assert getattr(profile, overlap) <= 1.0, "nothing hides more than itself"
    assert profile.shard_sharpness >= 1.0  # below 1 two overlapping resources would take longer than one after another


def test_no_profile_is_a_table_of_rows():
    """Some scalars per framework, and none per source. Eleven say what our own trainer does; others leave them."""
    ours = {
        "loss", "cast", "plain_elementwise", "plain_cast", "selective_attention", "selective_streams",
        "early_stop", "narrow_share", "launch_sharpness", "accumulate_bytes", "exchange_again",
    }  # fmt: skip
    assert len(set(PROFILE_FIELDS) - ours) <= 25
    assert len(shipped_profiles()) <= 12
    usual = Profile()
    for name, one in shipped_profiles().items():
        assert name == "phalanx" or all(getattr(one, key) == getattr(usual, key) for key in ours)


def test_stack_keeps_the_order():
    both = stack_profiles([Profile(gemm=0.5), Profile(gemm=1.0, launch_s=1.0)])
    assert np.asarray(both.gemm).tolist() == [0.5, 1.0]
    assert np.asarray(both.launch_s).tolist() == [10e-6, 1.0]
