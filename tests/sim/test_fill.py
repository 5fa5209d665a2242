"""Max-min fair filling: textbook cases, both engines, and the definition itself on random problems."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.sim import fair_rates
from phalanx.sim.fair_rates import LinkTable, fair_rates_of

ENGINES = ("numba", "numpy")


def table(rows: list[list[int]], pull: list[float] | None = None) -> LinkTable:
    start = np.cumsum([0, *(len(row) for row in rows)])
    link = np.array([link for row in rows for link in row], dtype=np.int32)
    return LinkTable(start=start, link=link, pull=np.ones(len(rows)) if pull is None else np.array(pull))


@pytest.mark.parametrize("engine", ENGINES)
def test_long_flow_and_two_short_ones(engine: str) -> None:
    # Link 0 is shared by rows 0 and 1, link 1 by rows 0 and 2: the small link stops row 0, the other takes the rest.
    rates = fair_rates_of(table([[0, 1], [0], [1]]), np.array([10.0, 4.0]), engine=engine)
    assert rates.tolist() == pytest.approx([2.0, 8.0, 2.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_dead_link_gives_nothing_and_takes_nothing(engine: str) -> None:
    rates = fair_rates_of(table([[0, 1], [1]]), np.array([0.0, 6.0]), engine=engine)
    assert rates.tolist() == pytest.approx([0.0, 6.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_pull_divides_a_link_in_proportion(engine: str) -> None:
    rates = fair_rates_of(table([[0], [0], [0]], pull=[1.0, 2.0, 3.0]), np.array([12.0]), engine=engine)
    assert rates.tolist() == pytest.approx([2.0, 4.0, 6.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_few_rows_on_many_links(engine: str) -> None:
    rates = fair_rates_of(table([[900], [900], [17]]), np.full(1000, 8.0), engine=engine)
    assert rates.tolist() == pytest.approx([4.0, 4.0, 8.0])


def random_problem(seed: int) -> tuple[LinkTable, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = [list(rng.choice(40, size=rng.integers(1, 6), replace=False)) for _ in range(120)]
    return table(rows), rng.uniform(0.5, 5.0, 40)


@pytest.mark.parametrize("seed", range(5))
def test_definition_holds_and_engines_agree(seed: int) -> None:
    """Max-min: no link is overfull, and every row meets a full link on which nobody is faster."""
    problem, capacity = random_problem(seed)
    rates = fair_rates_of(problem, capacity, engine="numba")
    assert rates == pytest.approx(fair_rates_of(problem, capacity, engine="numpy"), rel=1e-9)
    row = np.repeat(np.arange(len(rates)), np.diff(problem.start))
    load = np.bincount(problem.link, weights=rates[row], minlength=len(capacity))
    assert (load <= capacity * (1 + 1e-9)).all()
    fastest = np.zeros(len(capacity))
    np.maximum.at(fastest, problem.link, rates[row])
    bottleneck = (load >= capacity * (1 - 1e-9))[problem.link] & (rates[row] >= fastest[problem.link] * (1 - 1e-9))
    assert np.bincount(row, weights=bottleneck).min() >= 1


def test_some_rows_are_a_table_of_their_own() -> None:
    whole = table([[0, 1], [2], [1, 2, 3]], pull=[1.0, 2.0, 3.0])
    some = whole.some(np.array([0, 2]))
    assert (some.start.tolist(), some.link.tolist(), some.pull.tolist()) == ([0, 2, 5], [0, 1, 1, 2, 3], [1.0, 3.0])


def test_without_numba_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.errors import UserError
    from phalanx.sim import fair_rates

    monkeypatch.setattr(fair_rates, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        fair_rates.compile_loop(len)
    assert "pip install 'phalanx[sim]'" in str(caught.value)


def test_where_nothing_can_be_written_the_loop_is_compiled_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba raises RuntimeError when neither the package nor the home folder can be written."""
    from types import SimpleNamespace

    def njit(*, nogil: bool, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(fair_rates, "import_module", lambda name: SimpleNamespace(njit=njit))
    assert fair_rates.compile_loop(len) is len
