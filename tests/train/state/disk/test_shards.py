"""Arithmetic of boxes against counting every element."""

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.state.shards import Region, first_coverage_gap, shared_region, whole_region


def cells(box):
    return set(product(*(range(a, b) for a, b in zip(box.start, box.end, strict=True))))


def boxes_of(dims, most=5):
    sides = st.tuples(*[st.integers(0, most)] * dims)
    return st.builds(Region, sides, sides)


@st.composite
def families(draw):
    dims = draw(st.integers(0, 3))
    return draw(boxes_of(dims)), draw(st.lists(boxes_of(dims), min_size=1, max_size=6))


@given(families())
def test_overlap_is_what_both_hold(family):
    target, others = family
    for other in others:
        shared = shared_region(target, other)
        assert (cells(shared) if shared else set()) == cells(target) & cells(other)


@given(families())
def test_a_gap_is_found_exactly_when_an_element_is_not_covered_once(family):
    target, others = family
    parts = [part for other in others if (part := shared_region(target, other))]
    times = Counter(cell for part in parts for cell in cells(part))
    wrong = {cell for cell in cells(target) if times[cell] != 1}
    gap = first_coverage_gap(target, parts)
    assert bool(gap) == bool(wrong)
    if gap:
        assert cells(gap.region) <= wrong
        assert {times[cell] for cell in cells(gap.region)} == {gap.times}


def test_a_scalar_is_one_element_without_dimensions():
    scalar = whole_region(())
    assert scalar.volume == 1
    assert shared_region(scalar, scalar) == scalar
    assert first_coverage_gap(scalar, []).times == 0


def test_a_box_is_cut_out_of_the_box_that_holds_it():
    assert Region((3, 4), (1, 2)).within(Region((2, 4), (5, 5))) == (slice(1, 2), slice(0, 2))
