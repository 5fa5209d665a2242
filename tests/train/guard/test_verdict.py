"""Who is wrong, from digests alone."""

from __future__ import annotations

import pytest

from phalanx.train.guard.divergence_verdict import DigestClaim, Divergence, judge_claims, settle_divergence


def claims(boxes: str, *digests: str, first: int = 0) -> list[DigestClaim]:
    return [DigestClaim(rank=first + n, boxes=boxes, digest=one, tensors=3) for n, one in enumerate(digests)]


@pytest.mark.parametrize(
    ("digests", "suspects", "certain"),
    [
        ("aab", (2,), True),
        ("aaabab", (3, 5), True),
        ("aabc", (2, 3), True),
        ("ab", (0, 1), False),
        ("aabb", (0, 1, 2, 3), False),
        ("abc", (0, 1, 2), False),
    ],
)
def test_the_most_are_right(digests: str, suspects: tuple[int, ...], certain: bool) -> None:
    found = judge_claims(7, claims("x", *digests))
    assert found is not None
    assert (found.suspects, found.certain, found.step) == (suspects, certain, 7)
    assert found.digests == dict(enumerate(digests))


@pytest.mark.parametrize("digests", ["a", "aa", "aaaa"])
def test_copies_that_agree(digests: str) -> None:
    assert judge_claims(7, claims("x", *digests)) is None
    assert judge_claims(7, []) is None


def test_a_set_that_names_the_rank_comes_first() -> None:
    split = claims("a", "p", "q", first=1)  # ranks 1 and 2 differ
    whole = claims("b", "r", "r", "s", "r")  # rank 2 does
    found = judge_claims(7, [*split, *whole])
    assert found is not None
    assert (found.suspects, found.certain, found.boxes) == ((2,), True, "b")
    assert judge_claims(7, [*reversed(whole), *reversed(split)]) == found, "in whatever order ranks answer"


def test_suspects_are_sorted_in_whatever_order_ranks_answer() -> None:
    found = judge_claims(7, [*reversed(claims("x", "p", "q", "r"))])
    assert found is not None
    assert found.suspects == (0, 1, 2)


@pytest.mark.parametrize(("first", "second"), [("x", "y"), ("y", "x")])
def test_among_equally_clear_sets_the_lowest_suspects_and_then_the_lowest_name_come_first(
    first: str, second: str
) -> None:
    low, high = claims(first, "p", "q"), claims(second, "p", "q", first=3)
    for order in (low + high, high + low):
        found = judge_claims(7, order)
        assert found is not None
        assert (found.suspects, found.boxes) == ((0, 1), first)
    both = claims(first, "p", "q") + claims(second, "r", "s")
    found = judge_claims(7, both)
    assert found is not None
    assert found.boxes == "x"


def test_settling() -> None:
    assert settle_divergence({1: "p", 2: "q"}, "p") == 2
    assert settle_divergence({1: "p", 2: "q"}, "q") == 1
    assert settle_divergence({1: "p", 2: "q"}, "r") is None
    assert settle_divergence({1: "p", 2: "p"}, "p") is None
    assert settle_divergence({1: "p"}, "q") is None, "one holder has no copy that was right"


def test_the_way_through_a_message_and_back() -> None:
    found = judge_claims(7, claims("x", "a", "a", "b"))
    assert found is not None
    assert Divergence.from_json(found.to_json()) == found


def test_messages() -> None:
    found = judge_claims(1800, claims("x", "a", "a", "b"))
    assert found is not None
    assert found.problem().render() == (
        "step 1,800: rank 2 holds other values than its 2 copies\n"
        "  memory or arithmetic failed without a word; every step from here on would learn from it\n"
        "  go back to the last state that was compared, without that rank's device"
    )


@pytest.mark.parametrize(
    ("kind", "suspects", "certain", "tensors", "what"),
    [
        ("copies", (0, 1), False, (), "copies on ranks 0, 1 differ, and no majority tells which is right"),
        ("copies", (2,), True, ("a", "b"), "rank 2 holds other values than its 3 copies (a, b)"),
        ("copies", (1, 3), True, (), "ranks 1, 3 hold other values than the 2 copies that agree"),
        ("rest", (3,), True, (), "weights or optimizer state of rank 3 changed between two updates"),
        ("rest", (1, 3), True, ("a",), "weights or optimizer state of ranks 1, 3 changed between two updates (a)"),
        (
            "rest",
            (0, 1, 2, 3),
            False,
            ("a",),
            "weights or optimizer state of every rank changed between two updates (a)",
        ),
    ],
)
def test_message_of_each_kind(
    kind: str, suspects: tuple[int, ...], certain: bool, tensors: tuple[str, ...], what: str
) -> None:
    digests = dict.fromkeys(range(4), "a")
    found = Divergence(
        step=5, kind=kind, suspects=suspects, certain=certain, boxes="x", digests=digests, tensors=tensors
    )
    problem = found.problem()
    assert (problem.where, problem.what) == ("step 5", what)
    is_own_code = kind == "rest" and not certain
    assert ("code other than the optimizer" in problem.why) == is_own_code
    assert ("phalanx.Callback" in problem.fix) == is_own_code
