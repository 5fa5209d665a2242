"""Tables of the report on a narrow screen: short cells stay on their line, long ones may break."""

from __future__ import annotations

from phalanx.io.style import REPORT_CSS
from phalanx.record.report.html import _table_html
from phalanx.record.report.sections import Table


def test_only_long_texts_break_on_a_narrow_screen() -> None:
    made = _table_html(Table(head=("rank", "place", "what"), rows=(("1", "data 1", "x" * 60),), right=(0,)))
    assert '<td class="n">1</td><td>data 1</td><td class="long">' in made
    assert made.startswith('<div class="scroll">')
    narrow = REPORT_CSS[REPORT_CSS.index("@media (max-width: 520px)") :]
    assert "td { white-space: nowrap; } td.long { white-space: normal; }" in narrow
