"""`phalanx sim JOB --days N`."""

import json

import pytest

from phalanx.api import simulating
from phalanx.cli.main import main
from phalanx.sim.months import simulate_run as months

JOB = """\
name = "small"
[model]
preset = "gpt2"
[data]
sequence = 1024
tokens = "2B"
[batch]
global_sequences = 64
[cluster]
spec = "8xH100:4"
[fault]
failures_per_host_day = 0.5
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def test_page_on_stdout_progress_on_stderr(job, capsys):
    assert main(["sim", job, "--days", "20", "--runs", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "small: 20 days on 8xH100-80GB-SXM:4 (32 devices), 3 runs, seed 0\n  effective training time "
    )
    for title in ("WHERE THE TIME GOES", "COMPARED WITH THE PLANNER'S FORMULA", "FAILURES", "SPARES AND GAPS", "MONEY"):
        assert f"\n{title}\n" in out
    assert " failures in " in err
    assert " per second)" in err


def test_json_repeats_with_the_seed(job, capsys):
    def found(*options):
        assert main(["sim", job, "--days", "20", "--runs", "3", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    one = found()
    assert one == found()
    assert one["effective"]["low"] <= one["effective"]["mean"] <= one["effective"]["high"] < 1
    assert one["runs"] == 3
    assert found("--seed", "1")["effective"] != one["effective"]
    assert found("--edge-recovery")["borne"] > 0
    assert found("--planned-per-day", "5")["planned"] > 50
    assert found("--weibull", "0.6")["interruptions"] != one["interruptions"]
    assert found("--set", "fault.restart_s=3000")["effective"]["mean"] < one["effective"]["mean"]


def test_the_range_of_sites_and_its_luck_are_told_apart(job, tmp_path, capsys):
    """Figures that are the user's own do not spread; what nobody gave spreads as published sites do."""

    def found(*options, cluster="8xH100:64"):
        assert main(["sim", job, "--days", "60", "--runs", "5", "--json", "--cluster", cluster, *options]) == 0
        return json.loads(capsys.readouterr().out)

    def page(*options):
        assert main(["sim", job, "--days", "60", "--runs", "5", "--cluster", "8xH100:64", *options]) == 0
        return capsys.readouterr().out

    own_rate = found()  # fault.failures_per_host_day is in the job
    assert own_rate["sites"]["failures_per_host_day"] is None
    assert own_rate["sites"]["recovery_s"] is not None
    luck = own_rate["interruptions"]["run_high"] / own_rate["interruptions"]["run_low"]
    low, high = own_rate["sites"]["interruptions"]
    assert high / low < 1.2 * luck
    own = ("--set", "fault.detect_s=20", "--set", "fault.restart_s=200")
    assert found(*own)["sites"] is None
    assert "are your own, so the ranges show run-to-run variation only" in " ".join(page(*own).split())
    text = JOB.replace("failures_per_host_day = 0.5", "detect_s = 30")
    (tmp_path / "job.toml").write_text(text)
    anyone = found()
    low, high = anyone["sites"]["interruptions"]
    assert low < anyone["interruptions"]["run_low"] < anyone["interruptions"]["run_high"] < high
    assert high / low > 5
    low, high = anyone["sites"]["effective"]
    assert low < anyone["effective"]["mean"] < high
    out = page()
    assert out.count("(80% of sites: ") == 2
    assert out.count("; of which run-to-run variation: ") == 2
    cluster = tmp_path / "own.toml"
    cluster.write_text(
        'name = "own"\naccelerator = "H100"\ndomain_devices = 8\ndomains = 64\nfailures_per_host_day = 0.004\n'
    )
    mine = found(cluster=str(cluster))
    assert mine["sites"]["failures_per_host_day"] is None
    low, high = mine["sites"]["interruptions"]
    assert high / low < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--days", "0"], "phalanx sim: --days 0 is out of range\n  use 0.01 to 3653\n"),
        (["--days", "nan"], "phalanx sim: --days nan is out of range\n"),
        (["--days", "9", "--runs", "0"], "phalanx sim: --runs 0 is out of range\n  use 1 to 10000\n"),
        (["--days", "9", "--weibull", "0"], "phalanx sim: --weibull 0 is out of range\n  use 0.3 to 5\n"),
        (
            ["--days", "9", "--edge-recovery", "--planes", "1"],
            "phalanx sim: --planes 1 with --edge-recovery\n  a NIC of one plane loses everything with its link",
        ),
        (["--days", "9", "--planes", "0"], "phalanx sim: --planes 0 is out of range\n  use 1 to 1024\n"),
        (
            ["--days", "9", "--fabric", "clos2:32x400G/4p/8", "--planes", "8"],
            "phalanx sim: --planes 8, and clos2:32x400G/4p/8 has 4\n  leave --planes out: the fabric says it\n",
        ),
        (
            ["--days", "9", "--fabric", "clos2:16x400G/4p/8"],
            "fabric clos2:16x400G/4p/8: it has 16 NICs, and the plan has 32 devices with one each\n",
        ),
        (["--days", "9", "--fabric", "none.toml"], "none.toml: there is no such file\n"),
        (
            ["--days", "9", "--compare", "--levers"],
            "phalanx sim: --compare and --levers are two tables\n  leave one of them out\n",
        ),
        (
            ["--days", "3653", "--runs", "10000", "--cluster", "8xH100:8"],
            "phalanx sim: 10,000 runs of 3,653 days would see 146,120,000 failures\n"
            "  more than 5,000,000 take minutes\n  use --runs 342\n",
        ),
        (["--days", "9", "--cluster", "8xH100:125000000000"], "cluster '8xH100:125000000000': has 1,000,000,000,000"),
        (["--days", "lots"], "phalanx sim: argument --days: invalid float value: 'lots'\n"),
    ],
)
def test_wrong_calls(job, capsys, options, message):
    assert main(["sim", job, *options]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(message)
    assert out == ""


def test_all_wrong_options_at_once(job, capsys):
    assert main(["sim", job, "--days", "-1", "--runs", "0", "--repair-hours", "-2"]) == 2
    err = capsys.readouterr().err
    assert all(f"{option} " in err for option in ("--days", "--runs", "--repair-hours"))


def test_a_fabric_brings_its_planes_links_and_switches(job, capsys):
    options = ["--days", "90", "--fabric", "clos2:32x400G/4p/8", "--edge-recovery", "--json"]
    assert main(["sim", job, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fabric"], found["planes"], found["edge"]) == ("clos2:32x400G/4p/8", 4, True)
    rates = {one["cause"]: one for one in found["rates"]}
    assert {"link", "uplink", "T0 switch", "T1 switch"} < rates.keys()
    assert rates["T0 switch"]["units"] == 4 * 8
    assert all(one["source"] for one in rates.values())
    assert found["by_cause"]["link"] == 0


def test_infiniband_is_told_to_have_no_recovery_at_the_edge(job, capsys):
    short = ["sim", job, "--days", "5", "--runs", "2", "--edge-recovery", "--fabric"]
    assert main([*short, "clos2:32x400G/2p/Quantum-2"]) == 0
    assert "is InfiniBand: for recovery at the edge stands what its switches do" in capsys.readouterr().err
    assert main([*short, "clos2:32x400G/4p/8"]) == 0
    assert "InfiniBand" not in capsys.readouterr().err


def test_a_job_inside_a_domain_does_not_notice_the_fabric(job, capsys):
    assert (
        main(["sim", job, "--cluster", "8xH100", "--days", "5", "--runs", "2", "--fabric", "clos2:32x400G/4p/8"]) == 0
    )
    out = capsys.readouterr().out
    assert "\n  network clos2:32x400G/4p/8, unused: all traffic of this job" in out
    assert "\n  uplink" not in out


def test_planes_without_effect_are_warned_of(job, capsys):
    assert main(["sim", job, "--days", "5", "--runs", "2", "--planes", "4"]) == 0
    assert "warning: phalanx sim: --planes has no effect" in capsys.readouterr().err


def test_compare_is_one_table(job, capsys):
    assert main(["sim", job, "--days", "20", "--runs", "3", "--compare"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 + 1 + 6 + 3
    assert "the same failures in every row (3 runs each, seed 0)" in out
    assert main(["sim", job, "--days", "20", "--runs", "3", "--compare", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(one["recovery_s"], one["edge"]) for one in rows][:2] == [(600.0, False), (600.0, True)]


def test_ctrl_c_shows_finished_rows(job, capsys, monkeypatch):
    stopped_after(monkeypatch, 5)
    assert main(["sim", job, "--days", "5", "--runs", "2", "--compare"]) == 130
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + 1 + 2 + 3
    assert err == "stopped by Ctrl-C: 2 of 6 rows are finished, and shown\n"


def test_a_long_run_is_announced(job, capsys, monkeypatch):
    monkeypatch.setattr(simulating, "FAILURES_PER_S", 1)
    assert main(["sim", job, "--days", "20", "--runs", "3"]) == 0
    assert capsys.readouterr().err.startswith("about 120 failures: 120 s\n")


def test_levers(job, capsys):
    assert main(["sim", job, "--days", "20", "--runs", "3", "--levers"]) == 0
    assert "\nWHAT WOULD HELP, ONE CHANGE AT A TIME\n  change " in capsys.readouterr().out


def test_one_run_has_no_interval(job, capsys):
    assert main(["sim", job, "--days", "20", "--runs", "1", "--levers"]) == 0
    out = capsys.readouterr().out
    assert "(32 devices), one run, seed 0\n" in out
    assert "confidence" not in out.partition("WHAT WOULD HELP")[0]
    assert "nan" not in out
    assert main(["sim", job, "--days", "20", "--runs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["effective"]["low"] is None


def stopped_after(monkeypatch, count):
    simulate, done = months.simulate_run, []

    def step(*args, **options):
        if len(done) == count:
            raise KeyboardInterrupt
        done.append(1)
        return simulate(*args, **options)

    monkeypatch.setattr(months, "simulate_run", step)


def test_ctrl_c_shows_what_is_finished(job, capsys, monkeypatch):
    stopped_after(monkeypatch, 2)
    assert main(["sim", job, "--days", "5", "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"] == 2
    assert err == "stopped by Ctrl-C: 2 of 20 runs are finished, and shown\n"


def test_ctrl_c_before_anything_is_finished(job, capsys, monkeypatch):
    stopped_after(monkeypatch, 0)
    assert main(["sim", job, "--days", "5"]) == 130
    assert capsys.readouterr() == ("", "stopped by Ctrl-C\n")
