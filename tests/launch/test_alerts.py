"""The alerts of `phalanx cluster init`, held against made-up series by Prometheus itself (promtool test rules)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import phalanx
from phalanx.launch.operate.operator_pods import ALERTS

TEAMS = Path(__file__).parents[2] / "examples" / "operator" / "teams.toml"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.prefix) / "bin"))
# Alert -> series in which all is well, series in which it must fire, labels of what fires. A value per minute.
SERIES = {
    "GpuXidError": (
        {'DCGM_FI_DEV_XID_ERRORS{Hostname="n1",gpu="3"}': "0x120"},
        {'DCGM_FI_DEV_XID_ERRORS{Hostname="n1",gpu="3"}': "79x120"},
        {"Hostname": "n1", "gpu": "3"},
    ),
    "GpuMemoryUncorrectable": (
        {'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{Hostname="n1"}': "4x120"},  # of an earlier day
        {'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{Hostname="n1"}': "0x110 1x10"},
        {"Hostname": "n1"},
    ),
    "NvlinkErrors": (
        {'DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{Hostname="n1"}': "0+60x120"},
        {'DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{Hostname="n1"}': "0+12000x120"},
        {"Hostname": "n1"},
    ),
    "NodesCordoned": (
        {
            **{f'kube_node_info{{node="n{n}"}}': "1x120" for n in range(10)},
            'kube_node_spec_unschedulable{node="n1"}': "1x120",
        },
        {
            **{f'kube_node_info{{node="n{n}"}}': "1x120" for n in range(10)},
            **{f'kube_node_spec_unschedulable{{node="n{n}"}}': "1x120" for n in range(2)},
        },
        {},
    ),
    "ApiServerThrottles": (
        {'apiserver_request_total{code="429"}': "0+30x120", 'apiserver_request_total{code="200"}': "0+60000x120"},
        {'apiserver_request_total{code="429",verb="LIST"}': "0+120x120"},
        {},
    ),
    "ApiServerErrors": (
        {'apiserver_request_total{code="500"}': "0+30x120", 'apiserver_request_total{code="404"}': "0+60000x120"},
        {'apiserver_request_total{code="500"}': "0+60x120", 'apiserver_request_total{code="504"}': "0+60x120"},
        {},
    ),
    "QueueStuck": (
        {'kueue_pending_workloads{cluster_queue="vision",status="active"}': "3x120"},
        {'kueue_pending_workloads{cluster_queue="vision",status="inadmissible"}': "3x120"},
        {"cluster_queue": "vision"},
    ),
}


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: .ci/packages unpacks it where apt-get can download")
def test_each_alert_fires_on_what_it_is_for_and_is_silent_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    phalanx.cluster_init(TEAMS, out=tmp_path / "out")
    [rules] = [
        document["spec"]
        for document in yaml.safe_load_all((tmp_path / "out" / "lab.yaml").read_text())
        if document["kind"] == "PrometheusRule"
    ]
    said = {rule["alert"]: rule["annotations"]["summary"] for group in rules["groups"] for rule in group["rules"]}
    assert set(said) == set(SERIES) == {name for name, *_ in ALERTS}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    tests = []
    for alert, (well, broken, labels) in SERIES.items():
        summary = said[alert]
        for name, value in labels.items():
            summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
        fires = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]
        for series, expected in ((well, []), (broken, fires)):
            given = [{"series": name, "values": values} for name, values in series.items()]
            wanted = [{"eval_time": "115m", "alertname": alert, "exp_alerts": expected}]
            tests.append({"interval": "1m", "input_series": given, "alert_rule_test": wanted})
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run([str(PROMTOOL), *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
