"""A rule's page has all its sections, and docs/rules is what the rules say."""

from __future__ import annotations

from pathlib import Path

import pytest
from rules.kit import evidence
from rules.toy import rule

from phalanx.rules.edition import all_rules, find_rule
from phalanx.rules.explain import explain_evidence, target_section
from phalanx.rules.rule_page import SECTIONS, rule_index, rule_page, rule_pages, rule_sections

DOCS = Path(__file__).parents[2] / "docs" / "rules"


@pytest.mark.parametrize("one", all_rules(), ids=lambda one: one.id)
def test_every_page_has_its_sections_in_order(one) -> None:
    headings = [line.removeprefix("## ") for line in rule_page(one).splitlines() if line.startswith("## ")]
    assert headings == list(SECTIONS)
    assert all(text.strip() for text in rule_sections(one).values())


def test_limits_stand_by_profile_and_class() -> None:
    assert "| `toys` | 0 toys | same | S3 on: 1 toy | on the floor \\| our choice |" in rule_page(rule())


def test_docs_are_what_the_rules_say() -> None:
    made = rule_pages(all_rules())
    found = {path.name for path in DOCS.glob("*.md")}
    assert found == set(made), "run: phalanx rules --write docs/rules"
    stale = [name for name, text in made.items() if (DOCS / name).read_text(encoding="utf-8") != text]
    assert not stale, "run: phalanx rules --write docs/rules"


def test_the_index_names_every_rule() -> None:
    text = rule_index(all_rules())
    assert all(f"[{one.id}]" in text for one in all_rules())
    assert "`nvidia-h100`" in text
    assert "- S6: " in text


def test_explained_with_the_numbers_of_a_job() -> None:
    told = target_section(explain_evidence(find_rule("CKP001"), evidence("checkpoint.interval_s=86400")))
    assert told.startswith("# CKP001 on ")
    assert "**fail** (error), " in told
    assert "job.toml" in told
    assert "interval 86,400 s" in told
    assert "    M = 86400 / (16 hosts" in told
    assert "checkpoint.interval_s = " in told
    assert "Limits for nvidia-h100, 128 devices, class S2:" in told
    assert "- `warn_ratio` = 2 x: " in told


def test_waivers_are_explained_after_all_other_rules() -> None:
    told = target_section(explain_evidence(find_rule("SPC001"), evidence()))
    assert "**pass**: 0 waivers" in told
