"""Credentials are found, and nothing else is taken for one."""

from __future__ import annotations

import hashlib
import json

import pytest
from synthetic import write_run

from phalanx.rules.log import secrets
from phalanx.rules.log.secrets import BLOCK_BYTES, MOST_FILE_BYTES, MOST_TEXT, is_secret
from phalanx.rules.log.stream import LogStream, read_log

RANDOM = "q8Zr2LxT0vBn5KsWj3Hd"


@pytest.mark.parametrize(
    "text",
    [
        "AKIA" + "IOSFODNN7EXAMPLE"[:16].replace("E", "Q"),
        "remote: https://me:hunter2@git.example/x.git",
        "ghp_" + "a1B2" * 9,
        "token hf_" + "aB3d" * 9,
        "using sk-proj-" + "aB3dE5" * 6,
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "DB_PASSWORD=correct-horse",
        '{"password": "correct-horse"}',
        f"api_key = {RANDOM}",
        f'"secret": "{RANDOM}{RANDOM}"',
        f"Authorization: Bearer {RANDOM}{RANDOM}",
    ],
)
def test_secrets(text):
    assert is_secret(text)


@pytest.mark.parametrize(
    "text",
    [
        "digest 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "job_digest=sha256:" + hashlib.sha256(b"x").hexdigest(),
        "commit 0123456789abcdef0123456789abcdef01234567",
        "tokens=4096 tokens_per_s=12137.535295892754 token 31999",
        "401 for [HF_TOKEN] at https://[password]@host/x",
        "password: required",
        "password=[DB_PASSWORD]",
        "password=********",
        "tokenizer=meta-llama/Llama-3.1-8B-Instruct",
        "key layers.12.attention.wq.weight is missing",
        "KeyError: 'model.layers.0.mlp.experts.17.weight'",
        "secret in the run folder is the run's own",
        "disk-0123456789abcdefghijklmnop task-abcdefghijklmnopqrstuvwxyz012",
        "http://127.0.0.1:8080/run@2",
        "token=none secret=null credentials: /etc/keys/2024/09/30/file1",
    ],
)
def test_no_secrets(text):
    assert not is_secret(text)


def test_a_normal_run_has_none_and_a_leak_is_placed(tmp_path):
    run = write_run(tmp_path, ranks=2, hosts=1, steps=60)
    run.set_launch(**run.launch() | {"provenance": {"job_digest": "sha256:" + "0f" * 32, "commit": "ab" * 20}})
    assert read_log(run).grammar.secrets == 0
    run.log(1).write_text("fine\nfine\nexport AWS_SECRET_ACCESS_KEY=" + RANDOM * 2 + "\n")
    found = read_log(run).grammar
    assert found.secrets == 1
    assert found.secrets_spot.file.endswith("logs/rank-00001.log")
    assert found.secrets_spot.line == 3


def test_texts_of_events_are_looked_through(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60)
    with open(run.events(0), "a") as file:
        text = "cannot reach s3://bucket with api_key=" + RANDOM
        file.write(
            json.dumps({"v": 1, "event": "remark", "t": 1794709000.0, "rank": 0, "step": 1, "text": text}) + "\n"
        )
    with open(run.supervisor, "a") as file:
        end = {"v": 1, "event": "end", "t": 1794709000.0, "rank": -1, "state": "x", "message": "https://a:b@c"}
        file.write(json.dumps(end) + "\n")
    assert read_log(run).grammar.secrets == 2


def test_a_growing_log_is_looked_at_once_and_a_long_one_not_to_its_end(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=40)
    run.log(0).write_text("password=correct-horse\n")
    stream = LogStream(run)
    stream.refresh()
    assert [stream.facts().grammar.secrets for _ in range(3)] == [1, 1, 1]
    with open(run.log(0), "a") as file:
        file.write("password=battery-staple\n")
        file.seek(MOST_FILE_BYTES + 10)
        file.truncate()
        file.write("password=battery-staple\n")
    assert stream.facts().grammar.secrets == 2


TOKEN = "hf_" + "aB3d" * 9


def _grammar(run):
    return read_log(run).grammar


def test_a_text_that_every_step_carries_is_looked_through(tmp_path):
    """Fields of somebody's own, the same in all events: they look like a column of the schema."""
    run = write_run(tmp_path, ranks=2, hosts=1, steps=60)
    lines = [json.loads(line) for line in run.events(1).read_text().splitlines()]
    steps = [place for place, event in enumerate(lines) if event["event"] == "step"]
    told = [event | ({"note": {"auth": ["x", TOKEN]}} if event["event"] == "step" else {}) for event in lines]
    run.events(1).write_text("".join(json.dumps(event) + "\n" for event in told))
    found = _grammar(run)
    assert found.secrets == len(steps)
    assert (found.secrets_spot.file[-18:], found.secrets_spot.line) == ("events-00001.jsonl", steps[0] + 1)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("step", {"digest": TOKEN}),
        ("monitor", {"utilization_source": TOKEN}),
        ("run_start", {"command": f"train --token={TOKEN}"}),
        ("evaluate", {"loss": TOKEN}),  # against the schema
    ],
)
def test_texts_of_the_schema_and_events_that_break_it_are_looked_through(tmp_path, kind, fields):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    lines = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    place = [number for number, event in enumerate(lines) if event["event"] == kind][-1]
    lines[place] |= fields
    run.events(0).write_text("".join(json.dumps(event) + "\n" for event in lines))
    found = _grammar(run)
    assert (found.secrets, found.secrets_spot.line) == (1, place + 1)


@pytest.mark.parametrize("before", [BLOCK_BYTES - 20, BLOCK_BYTES - 1, 2 * BLOCK_BYTES - 10, 3 * BLOCK_BYTES + 7])
@pytest.mark.parametrize("newline", ["\n", " "])
def test_a_key_across_two_blocks_is_found_once(tmp_path, before, newline):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=40)
    filler = ("word and word" + newline) * (before // 14)
    run.log(0).write_text(filler + "." * (before - len(filler) - 1) + f" {TOKEN}\nfine\n")
    found = _grammar(run)
    assert (found.secrets, found.secrets_spot.line) == (1, filler.count("\n") + 1)
    assert not found.secrets_partial


def test_a_key_far_in_a_line_is_found(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=40)
    run.log(0).write_text("word " * MOST_TEXT + TOKEN)
    assert _grammar(run).secrets == 1


def test_a_line_that_is_written_in_two_parts_is_searched_whole_and_counted_once(tmp_path):
    run = write_run(tmp_path, ranks=1, hosts=1, steps=40)
    run.log(0).write_text("fine\nlogin with " + TOKEN[:20])
    stream = LogStream(run)
    stream.refresh()
    assert stream.facts().grammar.secrets == 0
    for more in (TOKEN[20:] + " ", "and on\n", "fine\n", f"again {TOKEN}"):
        with open(run.log(0), "a") as file:
            file.write(more)
        found = stream.facts().grammar
        assert found.secrets == 1 + more.startswith("again")
        assert found.secrets_spot.line == 2


def test_what_was_not_searched_is_told(tmp_path, monkeypatch):
    run = write_run(tmp_path, ranks=2, hosts=1, steps=60)
    assert not _grammar(run).secrets_partial
    for name, value in (("MOST_EVENTS", 10), ("MOST_BYTES", 10), ("MOST_FILES", 2), ("MOST_FILE_BYTES", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(secrets, name, value)
            assert _grammar(run).secrets_partial, name
    run.log(1).unlink()
    run.log(1).symlink_to(run.log(0))
    assert _grammar(run).secrets_partial
