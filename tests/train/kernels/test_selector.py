"""The selector: measures once, remembers, takes nothing slower or wrong, and reads no damaged file."""

from __future__ import annotations

import json
import os

import pytest
import torch

from phalanx.hardware.kernel_choices import MOST_BYTES, kernel_cache_folder, read_choices
from phalanx.train.kernels.operations import load_all
from phalanx.train.kernels.selector import (
    BUILTIN,
    Timing,
    choice_key,
    choose_measured,
    choose_variant,
    fastest_variant,
    is_right,
    measure_variants,
)

CPU = torch.device("cpu")
KEY = choice_key("norm", {"width": 4, "tokens": 2}, torch.bfloat16, CPU)


def choose(folder, times, variants=("builtin", "triton")):
    """A choice, and how often it was measured for it."""
    asked = []
    timings = {name: Timing(median_ms=took) for name, took in times.items()}
    found = choose_measured("norm", KEY, variants, lambda: asked.append(1) or timings, folder=folder)
    return found, len(asked)


def test_a_choice_is_measured_once_and_remembered(tmp_path) -> None:
    folder = tmp_path / "kernels"
    first, measured = choose(folder, {"builtin": 2.0, "triton": 1.0})
    assert (first.variant, measured, first.is_remembered) == ("triton", 1, False)
    again, measured = choose(folder, {"builtin": 1.0, "triton": 2.0})
    assert (again.variant, measured, again.is_remembered) == ("triton", 0, True)
    assert again.describe() == "norm: triton, 1.00 ms (builtin 2.00 ms)"
    assert choose(folder, {"builtin": 1.0}, variants=("builtin",))[1] == 1  # a variant that is no more
    assert "torch 2." in KEY
    assert "tokens=2 width=4" in KEY


def test_an_entry_without_spreads_is_of_an_older_version_and_measured_again(tmp_path) -> None:
    """Those were timed one after the other, with whichever attention the process had come to."""
    entry = {"variant": "builtin", "times_ms": {"builtin": 1.0, "triton": 2.0}, "of": ["builtin", "triton"]}
    (tmp_path / "choices.json").write_text(json.dumps({"format": 1, "choices": {KEY: entry}}))
    found, measured = choose(tmp_path, {"builtin": 2.0, "triton": 1.0})
    assert (found.variant, measured) == ("triton", 1)


def test_a_gain_within_the_spread_is_not_taken() -> None:
    builtin = Timing(median_ms=1.0, spread_ms=0.06)
    assert fastest_variant({"builtin": builtin, "triton": Timing(median_ms=0.9, spread_ms=0.05)}) == BUILTIN
    assert fastest_variant({"builtin": builtin, "triton": Timing(median_ms=0.9, spread_ms=0.03)}) == "triton"


def test_nothing_slower_than_the_builtin_is_taken() -> None:
    assert choose(None, {"builtin": 1.0, "triton": 1.2})[0].variant == BUILTIN
    assert choose(None, {"builtin": 1.0, "triton": 0.99})[0].variant == BUILTIN  # within noise


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"format": 2, "choices": {KEY: {"variant": "triton", "times_ms": {}}}}),
        json.dumps({"format": 1, "choices": {KEY: {"variant": 3, "times_ms": {}}}}),
        json.dumps({"format": 1, "choices": {KEY: {"variant": "triton", "times_ms": {"triton": "fast"}}}}),
        json.dumps({"format": 1, "choices": {KEY: {"variant": "rm -rf", "times_ms": {}}}}),
        "9" * (MOST_BYTES + 1),
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path, text: str) -> None:
    (tmp_path / "choices.json").write_text(text)
    found, measured = choose(tmp_path, {"builtin": 2.0, "triton": 1.0})
    assert (found.variant, measured) == ("triton", 1)
    assert KEY in read_choices(tmp_path)  # and mended


def test_where_it_cannot_be_kept_it_is_not(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert choose(tmp_path / "file", {"builtin": 2.0, "triton": 1.0})[0].variant == "triton"
    assert kernel_cache_folder({}) is None
    assert kernel_cache_folder({"XDG_CACHE_HOME": "relative"}) is None
    os.symlink("/dev/zero", tmp_path / "choices.json")
    assert read_choices(tmp_path) == {}


def test_a_wrong_variant_is_never_taken_and_a_cpu_measures_nothing() -> None:
    from dataclasses import replace

    op = load_all()["rms-norm"]
    wrong = replace(op, variants={**op.variants, "fast": lambda x, weight: (x * weight,)})
    assert not is_right(wrong, "fast", torch.float32, CPU)
    assert "fast" not in measure_variants(wrong, {"tokens": 4, "width": 8}, torch.float32, CPU)
    assert choose_variant(op, op.shapes[0], torch.bfloat16, CPU, folder=None).times_ms == {}


def test_a_full_gpu_takes_the_builtin() -> None:
    from dataclasses import replace

    def refuse(*_: object) -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("full")

    timings = measure_variants(replace(load_all()["rope"], make_inputs=refuse), {"batch": 1}, torch.bfloat16, CPU)
    found = choose_measured("norm", KEY, ["builtin", "triton"], lambda: timings, folder=None)
    assert found.describe() == "norm: builtin"
