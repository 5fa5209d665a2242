"""`.cm` files: connections there and back, and what flows cannot hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.sim.htsim.connection_matrix import Connection, DeadLink, Matrix, Trigger, matrix_of, read_cm, write_cm
from phalanx.sim.traffic_matrix import all_to_all, make_flows, permutation

CHAIN = """Nodes 16
Connections 3
Triggers 2
Failures 2
# a chain
0->1 id 1 start 0 size 4096 send_done_trigger 7
1->2 id 2 trigger 7 size 4096 recv_done_trigger 8 prio 3
2->3 id 3 start 5000000 size 100
trigger id 7 oneshot
trigger id 8 barrier count 2
failure switch_type AGG switch_id 4 link_id 1
failure switch_type TOR switch_id 0 link_id 0
"""


def read(folder: Path, text: str) -> Matrix:
    path = folder / "f.cm"
    path.write_text(text, encoding="utf-8")
    return read_cm(path)


def test_connections_triggers_and_failures_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, CHAIN)
    assert found.connections == (
        Connection(source=0, target=1, nbytes=4096, ident=1, send_done=7),
        Connection(source=1, target=2, nbytes=4096, ident=2, start_ps=None, trigger=7, recv_done=8, priority=3),
        Connection(source=2, target=3, nbytes=100, ident=3, start_ps=5e6),
    )
    assert found.triggers == (Trigger(ident=7, kind="oneshot"), Trigger(ident=8, kind="barrier", count=2))
    assert found.failures[0] == DeadLink(switch="AGG", number=4, link=1)
    assert found.failed() == ("t1link:0/4/1",)
    assert found.flows().nbytes.tolist() == [4096, 4096, 100]


def test_what_is_not_simulated_is_said(tmp_path: Path) -> None:
    said = read(tmp_path, CHAIN).not_mapped(timed=False)
    assert [one.split(" ")[0] for one in said] == ["triggers:", "start", "priorities", "1"]
    assert "1 of 3 connections wait" in said[0]
    assert "up to 5 µs" in said[1]
    timed = read(tmp_path, CHAIN).not_mapped(timed=True)
    assert [one.split(" ")[0] for one in timed] == ["recv_done_trigger:", "priorities", "1"]


def test_starts_and_triggers_are_a_schedule(tmp_path: Path) -> None:
    found = read(tmp_path, CHAIN).schedule()
    assert found is not None
    assert found.start_s.tolist() == [0, 0, pytest.approx(5e-6)]
    assert (found.waits_for.tolist(), found.fires.tolist(), found.needed.tolist()) == ([-1, 0, -1], [0, 1, -1], [1, 2])
    matrix, _ = matrix_of(permutation(8, 100.0), 8)
    assert matrix.schedule() is None


def test_a_multishot_of_two_and_a_second_trigger_are_said() -> None:
    rows = (
        Connection(source=0, target=1, nbytes=1, send_done=1, recv_done=2),
        Connection(source=1, target=2, nbytes=1, start_ps=None, trigger=1),
        Connection(source=2, target=3, nbytes=1, start_ps=None, trigger=1),
    )
    triggers = (Trigger(ident=1, kind="multishot"), Trigger(ident=2, kind="oneshot"))
    said = Matrix(nodes=4, connections=rows, triggers=triggers).not_mapped(timed=True)
    assert [one.split(" ")[0] for one in said] == ["multishot:", "recv_done_trigger:", "send_done_trigger"]


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    found = read(tmp_path, CHAIN)
    assert read(tmp_path, write_cm(found)) == found


def test_a_permutation_of_1024_comes_back(tmp_path: Path) -> None:
    ours = permutation(1024, 2e6, seed=3)
    matrix, said = matrix_of(ours, 1024)
    back = read(tmp_path, write_cm(matrix))
    assert said == ()
    assert back.not_mapped(timed=False) == ()
    assert back.nodes == 1024
    for mine, theirs in zip(
        (ours.source, ours.target, ours.nbytes),
        (back.flows().source, back.flows().target, back.flows().nbytes),
        strict=True,
    ):
        assert np.array_equal(mine, theirs)


def test_planes_and_broken_bytes_are_said() -> None:
    matrix, said = matrix_of(all_to_all(4, 2e6), 4, parts=8)
    assert {one.nbytes for one in matrix.connections} == {83334}  # 2,000,000 / 3 / 8 = 83,333.3
    assert len(said) == 2
    with pytest.raises(UserError, match="3,000,000,000 bytes"):
        matrix_of(make_flows([0], [1], 3e9), 2)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("0->1", "\x1b[2Jx", 'f.cm:6: there is no "\\x1b[2Jx"'),
        ("0->1", "0->16", "f.cm:6: there is no node 16\n  nodes are 0 to 15"),
        ("0->1", "1->1", "f.cm:6: node 1 sends to itself"),
        ("0->1", "0->1->2", "is no connection"),
        ("size 4096 send", "sise 4096 send", "f.cm:6: there is no \"sise\"\n  did you mean size?"),
        ("start 0 size 4096", "start 0", "f.cm:6: no size"),
        ("start 0 size 4096", "start 0 size 0", "f.cm:6: size 0 is out of range"),
        ("start 0", "trigger 7 start 0", "either a start or a trigger"),
        ("start 0", "start soon", "not a time in picoseconds"),
        ("trigger 7 size", "trigger 9 size", "f.cm:7: trigger 9 is named but not described"),
        ("send_done_trigger 7", "prio 1", "f.cm:7: a connection waits for trigger 7, which 0 of 1 connections pull"),
        ("oneshot", "barrier count 2", "which 1 of 2 connections pull\n  it would never start\n  use count 1"),
        ("Connections 3", "Connections 4", "Connections 4, but the file has 3"),
        ("oneshot", "twoshot", "f.cm:9: there is no \"twoshot\""),
        ("switch_type AGG", "switch_type LEAF", "f.cm:11: no failure of a link"),
        ("Nodes 16\n", "", "a connection before Nodes"),
        ("# a chain", "Grp 0 1 2", "f.cm:5: there is no \"Grp\""),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_line(old: str, new: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, CHAIN.replace(old, new, 1))
    assert text in str(error.value)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("\n#\n")])
def test_no_file_a_folder_and_nothing_are_user_errors(make: object, tmp_path: Path) -> None:
    path = tmp_path / "f.cm"
    make(path)  # type: ignore[operator]
    with pytest.raises(UserError, match=r"f\.cm"):
        read_cm(path)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="019-> \nNodesConctiruzg#.", max_size=60), st.integers(0, len(CHAIN)))
def test_any_change_is_a_matrix_or_a_user_error(tmp_path_factory: pytest.TempPathFactory, extra: str, at: int) -> None:
    said = "f.cm"
    try:
        read(tmp_path_factory.getbasetemp(), CHAIN[:at] + extra + CHAIN[at:])
    except UserError as error:
        said = str(error)
    assert "f.cm" in said
