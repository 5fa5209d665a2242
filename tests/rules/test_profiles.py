"""Which profile an accelerator has."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.rules.profiles import PROFILES, find_profile, profile_of


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("8xA800:1", "nvidia-a100"),
        ("8xH20:1", "nvidia-h100"),
        ("8xH200:1", "nvidia-h200"),
        ("72xGB300:1", "nvidia-b200"),
        ("8xMI325X:1", "amd-mi300x"),
        ("8xMI355X:1", "custom"),
        ("8xA10:1", "custom"),
        ("8xRTX-3090:1", "custom"),
        ("8xRTX-5090:1", "custom"),
        ("8xV100:1", "custom"),
        ("16xTrainium2:1", "custom"),
    ],
)
def test_by_the_accelerator(spec: str, name: str) -> None:
    assert profile_of(resolve_cluster(spec)).name == name


def test_generations_of_tpu_differ_in_what_is_known_of_them() -> None:
    five, seven = (profile_of(resolve_cluster(f"256xTPU-{one}:1")) for one in ("v5e", "v7"))
    assert {five.name, seven.name} == {"tpu"}
    assert "fp8" in seven.formats
    assert "fp8" not in five.formats


def test_a_misspelt_profile_names_the_nearest() -> None:
    with pytest.raises(UserError) as told:
        find_profile("nvidia-h1000")
    assert "did you mean nvidia-h100?" in str(told.value)


def test_every_profile_can_be_asked_for_in_a_job() -> None:
    from phalanx.job.key_rules import rule_of
    from phalanx.job.schema import Job

    (field,) = (one for one in Job.__dataclass_fields__.values() if one.name == "profile")
    for name in PROFILES:
        assert rule_of(field.metadata).read(name) == name
