import pickle

import pytest

from phalanx.errors import Problem, UserError, mistake, nearest


@pytest.mark.parametrize(
    ("word", "choices", "found"),
    [
        ("tensr", ["tensor", "data"], "tensor"),
        ("TENSR", ["Tensor"], "Tensor"),
        ("plna", ["plan", "probe"], "plan"),
        ("H900", ["H100", "A100"], "H100"),
        ("jbo.toml", ["job.toml", "pyproject.toml"], "job.toml"),
        ("seq", ["sequence", "seed"], "sequence"),
        ("seqlen", ["sequence"], "sequence"),
    ],
)
def test_a_near_miss_is_found(word, choices, found):
    assert nearest(word, choices) == found


@pytest.mark.parametrize(
    ("word", "choices"),
    [
        ("mystery", ["composer", "megatron-core"]),
        ("colour", ["cluster", "cost"]),
        ("nosuch.toml", ["pyproject.toml"]),
        ("x.toml", ["job.toml"]),  # the ending alone is 5 of 6 letters
        ("tensor", []),
        ("", ["a"]),
    ],
)
def test_nonsense_is_not_suggested(word, choices):
    assert nearest(word, choices) == ""


def test_a_beginning_that_several_share_names_none():
    assert nearest("glo", ["global_tokens", "global_sequences"]) == ""


def test_a_message_spells_out_what_a_file_smuggles_in():
    problem = Problem(where="a\nb\x1b.toml", what='no key "\x1b[2J\x9b"', why="Jörg\u202e", fix="30 µs")
    assert problem.render() == 'a\\nb\\x1b.toml: no key "\\x1b[2J\\x9b"\n  Jörg\\u202e\n  30 µs'
    assert str(mistake("\x1b", "x")) == "\\x1b: x"


def test_no_line_of_a_part_poses_as_a_message():
    assert Problem(where="a", what="b\nc: d").render() == "a: b\n  c: d"


def test_what_is_rendered_already_is_not_indented_again():
    once = Problem(where="a", what="b", why="c", fix="d").render()
    assert Problem(where="", what=once).render() == once


def test_an_error_of_a_worker_arrives_whole():
    """A pool of processes sends it; one that could not be made again would break the pool instead."""
    sent = UserError([Problem(where="job.toml:3", what="is wrong", why="of this", fix="do that")] * 2)
    got = pickle.loads(pickle.dumps(sent))
    assert (type(got), got.problems, str(got)) == (UserError, sent.problems, str(sent))
