"""Who learns from what: disjoint and complete, whoever comes and goes; and which fragment is due when."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.slow_links.fragments import assign_fragments, due_fragment
from phalanx.train.slow_links.sample_deal import count_samples, deal_samples, uncounted_samples

PEERS = st.sets(st.sampled_from("abcdefgh"), min_size=1)


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(0, 200),
    first=st.integers(0, 10**12),
    churn=st.lists(st.tuples(PEERS, st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 60))), max_size=6),
    last=PEERS,
)
def test_every_sample_counts_once_whoever_comes_and_goes(batch, first, churn, last) -> None:
    """In every round some peers deliver a part of what they were dealt; the last round's deliver all."""
    left, learnt = (range(first, first + batch),), []
    for members, delivered in [*churn, (last, {})]:
        dealt = deal_samples(left, sorted(members))
        whole = (members, delivered) == (last, {})
        counts = {
            one: count_samples(dealt[one]) if whole else min(delivered.get(one, 0), count_samples(dealt[one]))
            for one in members
        }
        for one in members:
            learnt += [place for part in dealt[one] for place in part][: counts[one]]
        left = uncounted_samples(dealt, counts)
    assert not left
    assert sorted(learnt) == list(range(first, first + batch))


@given(batch=st.integers(0, 300), members=PEERS)
def test_shares_are_even_and_depend_on_nothing_but_the_members(batch, members) -> None:
    dealt = deal_samples((range(batch),), sorted(members))
    sizes = [count_samples(one) for one in dealt.values()]
    assert max(sizes) - min(sizes) <= 1
    assert dealt == deal_samples((range(batch),), sorted(members, reverse=True))


@given(
    batch=st.integers(0, 300),
    paces=st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 1e4), min_size=1),
)
def test_shares_follow_the_pace_and_nobody_is_far_from_the_median(batch, paces) -> None:
    sizes = {one: count_samples(part) for one, part in deal_samples((range(batch),), list(paces), paces).items()}
    assert sum(sizes.values()) == batch
    ordered = sorted(paces, key=lambda one: (paces[one], sizes[one]))
    assert all(sizes[slow] <= sizes[fast] + 1 for slow, fast in itertools.pairwise(ordered))
    assert max(sizes.values()) <= 16 * (min(sizes.values()) + 1) + 1
    unknown = deal_samples((range(batch),), [*paces, "z"], paces)
    assert unknown == deal_samples((range(batch),), [*paces, "z"])


@given(inner=st.integers(1, 60), data=st.data(), first=st.integers(0, 5))
def test_every_fragment_is_due_once_in_every_period(inner, data, first) -> None:
    fragments = data.draw(st.integers(1, inner))
    due = [due_fragment(first * inner + step, inner_steps=inner, fragments=fragments) for step in range(1, inner + 1)]
    assert [one for one in due if one is not None] == list(range(fragments))


@given(
    sizes=st.dictionaries(st.from_regex(r"(layers\.[0-9]{1,2}\.)?[a-z]{1,3}", fullmatch=True), st.integers(1, 99)),
    count=st.integers(1, 6),
)
def test_every_tensor_is_in_one_fragment(sizes, count) -> None:
    found = assign_fragments(sizes, count)
    assert found.keys() == sizes.keys()
    assert set(found.values()) <= set(range(count))
