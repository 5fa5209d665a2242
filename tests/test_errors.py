import pytest

from phalanx.errors import nearest


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
