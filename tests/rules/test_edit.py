"""Edits change their values and no other byte, or nothing at all."""

from __future__ import annotations

import os
import stat
import tomllib

import pytest

from phalanx.errors import UserError
from phalanx.rules.fixes import edited_text, read_exactly, unified_difference, write_exactly
from phalanx.rules.outcome import Edit

TEXT = """\
# head
spec = "2026.1"   # edition
name = "x"

[checkpoint]  # how often
# why a day
interval_s = 86400  # a day
keep = 3

# about the batch
[batch]
micro = 1 # m
ramp = [
  { until_tokens = 1, global_tokens = 2 },  # first
]
"""


def put(text: str, **values) -> str:
    return edited_text(
        text,
        [Edit(key=key.replace("__", "."), value=value, safe=True) for key, value in values.items()],
        where="job.toml",
    )


def test_a_value_is_replaced_where_it_stands() -> None:
    assert put(TEXT, checkpoint__interval_s=1418) == TEXT.replace("86400", "1418")
    assert put(TEXT, checkpoint__interval_s="auto", spec="2026.2") == TEXT.replace("86400", '"auto"').replace(
        "2026.1", "2026.2"
    )


def test_a_new_key_follows_the_last_one_of_its_section() -> None:
    assert put(TEXT, checkpoint__memory_every=2) == TEXT.replace("keep = 3\n", "keep = 3\nmemory_every = 2\n")
    assert put(TEXT, profile="tpu") == TEXT.replace('name = "x"\n', 'name = "x"\nprofile = "tpu"\n')


def test_a_value_of_many_lines_is_not_cut_in_two() -> None:
    after = put(TEXT, batch__global_sequences=8)
    assert tomllib.loads(after)["batch"]["global_sequences"] == 8
    assert after.replace("global_sequences = 8\n", "") == TEXT


def test_a_new_section_goes_to_the_end() -> None:
    assert put(TEXT, fault__spares=2) == TEXT + "\n[fault]\nspares = 2\n"
    assert put('name = "x"', fault__spares=2) == 'name = "x"\n\n[fault]\nspares = 2\n'


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("fault = {spares = 1, restarts=3} # f\n", "fault = {spares = 2, restarts=3} # f\n"),
        ("fault.spares = 1\nname='x'\n", "fault.spares = 2\nname='x'\n"),
        ("[fault]\r\nspares = 1 # c\r\n\r\n[data]\r\n", "[fault]\r\nspares = 2 # c\r\n\r\n[data]\r\n"),
        ("\ufeff[fault]\nspares = 1", "\ufeff[fault]\nspares = 2"),
        ("[fault]\nrestarts = 1", "[fault]\nrestarts = 1\nspares = 2\n"),
        ("[fault]\r\nrestarts = 1\r\n", "[fault]\r\nrestarts = 1\r\nspares = 2\r\n"),
        ("[fault]\n[data]\n", "[fault]\nspares = 2\n[data]\n"),
        ("[data]\n[[waiver]]\nrule='A'\n", "[data]\n[[waiver]]\nrule='A'\n\n[fault]\nspares = 2\n"),
    ],
)
def test_every_way_to_write_a_section(text: str, after: str) -> None:
    assert put(text, fault__spares=2) == after


def test_of_two_keys_that_say_the_same_one_is_left() -> None:
    after = put("[batch]\nglobal_tokens = 8  # t\nmicro = 1\n", batch__global_sequences=4)
    assert tomllib.loads(after) == {"batch": {"micro": 1, "global_sequences": 4}}


@pytest.mark.parametrize(
    "text",
    ["fault = 3\n", "[[fault]]\nspares = 1\n", "name = 'x'\nfault = ['a']\n", "[fault\n"],
)
def test_a_file_that_cannot_be_edited_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not edited"):
        put(text, fault__spares=2)


def test_the_file_keeps_its_rights_and_its_link(tmp_path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "job.toml"
    real.write_bytes(TEXT.replace("\n", "\r\n").encode())
    real.chmod(0o640)
    link.symlink_to(real)
    before = read_exactly(link)
    write_exactly(link, before, put(before, checkpoint__keep=5))
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert real.read_bytes() == TEXT.replace("\n", "\r\n").replace("keep = 3", "keep = 5").encode()
    assert sorted(os.listdir(tmp_path)) == ["job.toml", "real.toml"]


def test_a_file_that_somebody_else_changed_is_not_overwritten(tmp_path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TEXT + "# mine\n")
    with pytest.raises(UserError, match="someone else"):
        write_exactly(path, TEXT, "")
    assert path.read_text() == TEXT + "# mine\n"
    assert os.listdir(tmp_path) == ["job.toml"]


def test_the_diff_is_one_that_patch_reads() -> None:
    told = unified_difference("a\nb", "a\nc", name="job.toml")
    assert told.splitlines()[:2] == ["--- a/job.toml", "+++ b/job.toml"]
    assert told.count("\\ No newline at end of file") == 2
    assert unified_difference("a\n", "a\n", name="job.toml") == ""


def test_a_value_that_would_not_come_back_is_refused() -> None:
    with pytest.raises(UserError, match=r"fault\.dead_after_s would not come out as meant"):
        put(TEXT, fault__dead_after_s=float("nan"))
