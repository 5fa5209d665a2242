"""`phalanx fabric collective` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

TWO = "bytes,us\n16MiB,378.1\n8GiB,52733\n"  # 8 nodes of 8 x H100, NVIDIA/nccl-tests issue 309


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main(["fabric", "collective", *words]) == code
    made = capsys.readouterr()
    return made.out, made.err


def test_one_size_lists_every_pair_with_the_pick_first(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, "8xH100:16", "--bytes", "64MiB")
    assert out.startswith("all-reduce, 128 ranks: 16 nodes of 8 H100-80GB-SXM, 400 Gb/s per GPU\n")
    assert "*  NVLSTree   Simple" in out
    assert out.count("LL128") == 2
    assert "64 MiB takes 752 µs by links and NICs (80% of systems: 594 µs to 2.93 ms; 177.1 GB/s busbw)" in out
    assert "The range covers 80 % of systems" in out
    assert err == ""


def test_a_range_says_where_the_pick_changes(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "8xH200", "--bytes", "64KiB..16GiB")
    assert "Ring LL below 1.09 MiB, NVLS Simple above" in out
    out, _ = call(capsys, "8xH200", "--bytes", "1GiB..2GiB", "--no-nvls")
    assert "Ring Simple at every size between" in out


def test_fitted_on_two_sizes_the_others_are_close_to_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.csv"
    path.write_text(TWO)
    out, _ = call(capsys, "8xH100:8", "--bytes", "8MiB..8GiB", "--fit", str(path), "--json")
    found = json.loads(out)
    fitted = {round(one["nbytes"] / 2**20): one["fitted_s"] for one in found["sizes"]}
    assert fitted[8] is None
    for mib, us in {64: 718.1, 256: 1955.1, 1024: 7370.5, 4096: 26438.0}.items():
        assert fitted[mib] == pytest.approx(us * 1e-6, rel=0.1)
    out, _ = call(capsys, "8xH100:8", "--bytes", "1GiB", "--fit", str(path))
    assert " by the fit (80%: " in out
    assert " GB/s busbw)\nfitted on 2 sizes from 16 MiB on" in out
    assert out.endswith("(met exactly)\nthe file names no collective: taken for all-reduce\n")
    assert found["fit_kind_assumed"]


def test_other_devices_and_all_to_all_have_only_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.csv"
    path.write_text(TWO)
    out, _ = call(capsys, "8xMI300X:8", "--bytes", "16MiB..32MiB", "--fit", str(path))
    assert "NCCL picks" not in out
    assert "fitted" in out
    out, _ = call(capsys, "8xH100:8", "--kind", "alltoall", "--bytes", "1GiB", "--fit", str(path))
    assert "algorithm" not in out
    assert "1 GiB takes" in out
    out, _ = call(capsys, "8xH100:8", "--kind", "alltoall", "--bytes", "1MiB", "--fit", str(path))
    assert "the fit holds from 16 MiB on" in out


def test_a_log_of_another_collective_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(
        "# nccl-tests\n"
        " 16777216   4194304  float  sum  -1   200.00   83.89  162.53  0   200.0  83.89  162.53  0\n"
        "1073741824 268435456  float  sum  -1   5000.0  214.75  416.08  0   5000.  214.75  416.08  0\n"
    )
    out, err = call(capsys, "8xH100:4", "--bytes", "256MiB", "--kind", "all-gather", "--fit", str(path), code=2)
    assert out == ""
    assert "holds all-reduce, not all-gather" in err
    assert "add --kind all-reduce" in err
    _, err = call(capsys, "8xH100:1", "--bytes", "256MiB", "--fit", str(path), code=2)
    assert "busbw is 1.94 times algbw, and 1.75 for all-reduce on 8 ranks" in err
    out, _ = call(capsys, "8xH100:4", "--bytes", "256MiB", "--fit", str(path))
    assert out.endswith("the file names no collective: taken for all-reduce\n")
    path.write_text("# Collective test starting: all_reduce_perf\n" + path.read_text())
    assert "names no collective" not in call(capsys, "8xH100:4", "--bytes", "256MiB", "--fit", str(path))[0]


@pytest.mark.parametrize("kind", ["all-gather", "all_gather", "AllGather"])
def test_kinds_in_any_spelling(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "1xH100:64", "--kind", kind, "--bytes", "1MiB", "--json")
    found = json.loads(out)
    assert (found["kind"], found["ranks"]) == ("all-gather", 64)
    assert found["sizes"][0]["pairs"][0]["algorithm"] == "PAT"
    assert found["reigns"][0]["algorithm"] == "PAT"


def expected_s(capsys: pytest.CaptureFixture[str], *words: str) -> float:
    found = json.loads(call(capsys, "8xH100:4", "--bytes", "4GiB", *words, "--json")[0])
    return float(found["sizes"][0]["expected_s"])


def test_nics_hosts_and_switches_change_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    usual = expected_s(capsys)
    assert expected_s(capsys, "--nic-gbps", "200") > 1.5 * usual
    assert expected_s(capsys, "--cpu", "amd") > usual
    out, _ = call(capsys, "8xH100:4", "--bytes", "1GiB", "--sharp")
    assert "CollnetDirect" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["H100:1"], "one rank needs no collective"),
        (["8xH100", "--kind", "all-redoce"], "use all-reduce"),
        (["8xH100", "--kind", "all-to-all"], "it is sends and receives"),
        (["8xH100", "--bytes", "0"], "--bytes: a message of 0 bytes"),
        (["8xH100:2", "--nic-gbps", "0"], "--nic-gbps: a NIC of 0 Gb/s"),
        (["8xH100:2", "--nic-gbps", "nan"], "--nic-gbps: a NIC of nan Gb/s"),
        (["8xMI300X"], "RCCL has its own tables"),
        (["8xH100", "--fit", "/no/such/file"], "cannot be read"),
        (["8xH100", "--cpu", "sparc"], "--cpu"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, *words, code=2)
    assert out == ""
    assert message in err


def test_small_measurements_do_not_make_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.csv"
    path.write_text("bytes,us\n1MiB,30\n2MiB,34\n16MiB,110\n")
    _, err = call(capsys, "8xH100", "--fit", str(path), code=2)
    assert "3 measurements, 1 of them from 16 MiB on" in err
    assert "measure two sizes" in err
