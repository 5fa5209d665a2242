"""Scaling classes: what is good manners on 64 devices is a law on 100,000."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """A range of sizes; `most` devices belong to it."""

    name: str
    most: float
    text: str


CLASSES = (
    Scaling(name="S1", most=64, text="up to 64 devices: timing rules of CKP and FLT warn"),
    Scaling(name="S2", most=1_024, text="up to 1,024 devices"),
    Scaling(name="S3", most=4_096, text="up to 4,096 devices: spares and copies in memory are required"),
    Scaling(name="S4", most=32_768, text="up to 32,768 devices: replicas are compared, collectives are hierarchical"),
    Scaling(name="S5", most=100_000, text="up to 100,000 devices: steps commit or do not, whoever is lost"),
    Scaling(name="S6", most=float("inf"), text="beyond 100,000 devices: nothing larger has been published"),
)


def scaling_of(devices: int) -> Scaling:
    """The class of a job of so many devices.

    >>> scaling_of(64).name, scaling_of(65).name, scaling_of(131_072).name
    ('S1', 'S2', 'S6')
    """
    return next(one for one in CLASSES if devices <= one.most)


def at_least(scaling: Scaling, name: str) -> bool:
    """Whether a class is `name` or a larger one."""
    return scaling.name >= name
