"""Verdicts of `[ … ]`, `test` and `[[ … ]]`: true, false, or not known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from phalanx.rules.foreign.shell.arithmetic import UnknownNumberError
from phalanx.rules.foreign.shell.expansion import Scope, evaluate_in, expand_text
from phalanx.rules.foreign.shell.partial_text import is_known
from phalanx.rules.foreign.shell.patterns import matches_pattern

# Certainty of a verdict: `default` assumes that a variable which nothing sets is empty, as ${X:-8} does; `no
# arguments` assumes that the script is called without any. Only loops over arguments rely on the second.
Ground = Literal["sure", "default", "no arguments"]
NUMERIC = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
FILES = ("-f", "-e", "-d", "-s", "-r", "-w", "-x", "-L", "-h")
MOST_WORDS = 500


@dataclass(frozen=True, slots=True)
class ConditionVerdict:
    """True, false or, as None, not known; with its certainty."""

    holds: bool | None
    ground: Ground = "sure"


UNDECIDED = ConditionVerdict(None)


def weaker(one: Ground, two: Ground) -> Ground:
    """Return the less certain of two grounds."""
    order: tuple[Ground, ...] = ("sure", "default", "no arguments")
    return max(one, two, key=order.index)


def both(one: ConditionVerdict, two: ConditionVerdict) -> ConditionVerdict:
    """Return the conjunction of two verdicts."""
    if one.holds is False or two.holds is False:
        return one if one.holds is False else two
    if one.holds is None or two.holds is None:
        return UNDECIDED
    return ConditionVerdict(True, weaker(one.ground, two.ground))


def negated_verdict(one: ConditionVerdict) -> ConditionVerdict:
    """Return the negation of a verdict."""
    return ConditionVerdict(None if one.holds is None else not one.holds, one.ground)


class TestReader:
    """Parser of the words of one test. In `double` brackets the right side of == is a pattern, and words are raw."""

    def __init__(self, words: list[str], scope: Scope, files: dict[str, str], *, double: bool) -> None:
        self.words, self.scope, self.files, self.double = words, scope, files, double
        self.at = 0

    def verdict(self) -> ConditionVerdict:
        """Return the verdict of the test; undecided if it is not understood."""
        if len(self.words) > MOST_WORDS:
            return UNDECIDED
        try:
            result = self._or()
        except (IndexError, RecursionError):
            return UNDECIDED
        return result if self.at >= len(self.words) else UNDECIDED

    def _peek(self, ahead: int = 0) -> str:
        return self.words[self.at + ahead] if self.at + ahead < len(self.words) else ""

    def _or(self) -> ConditionVerdict:
        result = self._and()
        while self._peek() in (("||",) if self.double else ("-o",)):
            self.at += 1
            operand = self._and()
            result = negated_verdict(both(negated_verdict(result), negated_verdict(operand)))
        return result

    def _and(self) -> ConditionVerdict:
        result = self._not()
        while self._peek() in (("&&",) if self.double else ("-a",)):
            self.at += 1
            result = both(result, self._not())
        return result

    def _not(self) -> ConditionVerdict:
        if self._peek() == "!" and len(self.words) > self.at + 1:
            self.at += 1
            return negated_verdict(self._not())
        if self._peek() in ("(", "\\(") and len(self.words) > self.at + 2:
            self.at += 1
            result = self._or()
            self.at += 1
            return result
        return self._primary()

    def _text(self, word: str) -> str:
        return expand_text(word, self.scope) if self.double else word

    def _primary(self) -> ConditionVerdict:
        first, operator = self.words[self.at], self._peek(1)
        if operator in ("=", "==", "!=", "=~", "<", ">", *NUMERIC) and len(self.words) > self.at + 2:
            left, right = self._text(first), self._text(self.words[self.at + 2])
            self.at += 3
            return self._compare(left, operator, right)
        if first in ("-z", "-n", "-v", *FILES) and len(self.words) > self.at + 1:
            subject = self._text(self.words[self.at + 1])
            self.at += 2
            return self._unary(first, subject)
        if (
            re.fullmatch(r"-[a-zA-Z]", first)
            and len(self.words) > self.at + 1
            and operator not in ("-a", "-o", "&&", "||")
        ):
            self.at += 2
            return UNDECIDED
        self.at += 1
        return negated_verdict(self._unary("-z", self._text(first)))

    def _unary(self, operator: str, subject: str) -> ConditionVerdict:
        if operator == "-v":
            value = self.scope.get_variable(subject)
            return ConditionVerdict(value is not None, "sure" if value is not None else "default")
        if operator in FILES:
            return ConditionVerdict(True) if subject in self.files else UNDECIDED
        unknowns = self.scope.unknowns
        if unknowns.is_unset(subject):
            cause = unknowns.alone(subject)
            ground: Ground = "no arguments" if cause is not None and cause.name in "#@*123456789" else "default"
            return ConditionVerdict(operator == "-z", ground)
        if not is_known(subject):
            cause = unknowns.alone(subject)
            certain = cause is None or (cause.choices and all(any(one) for one in cause.choices))
            return ConditionVerdict(operator == "-n") if certain else UNDECIDED
        return ConditionVerdict((subject == "") == (operator == "-z"))

    def _compare(self, left: str, operator: str, right: str) -> ConditionVerdict:
        unknowns = self.scope.unknowns
        if operator in NUMERIC:
            return self._numbers(left, operator, right)
        if not is_known(left) or (not is_known(right) and right != left):
            # `while [ "$1" != "" ]` ends at once without arguments.
            if unknowns.is_unset(left) and right == "" and operator in ("=", "==", "!="):
                cause = unknowns.alone(left)
                ground: Ground = "no arguments" if cause is not None and cause.name.isdigit() else "default"
                return ConditionVerdict(operator != "!=", ground)
            return self._choices(left, operator, right)
        if operator == "=~":
            return self._regex(left, right)
        if operator in ("<", ">"):
            return ConditionVerdict(left < right if operator == "<" else left > right)
        is_equal = matches_pattern(left, right) if self.double else left == right
        return ConditionVerdict(is_equal if is_equal is None or operator != "!=" else not is_equal)

    def _choices(self, left: str, operator: str, right: str) -> ConditionVerdict:
        """Compare a text that is one of several: the verdict is known if all of them agree."""
        cause = self.scope.unknowns.alone(left)
        if cause is None or cause.kind != "either" or not cause.choices or not is_known(right):
            return UNDECIDED
        texts = [" ".join(choice) for choice in cause.choices]
        if not all(map(is_known, texts)) or operator not in ("=", "==", "!="):
            return UNDECIDED
        results = {matches_pattern(choice, right) if self.double else choice == right for choice in texts}
        if len(results) != 1 or None in results:
            return UNDECIDED
        return ConditionVerdict(results.pop() is (operator != "!="))

    def _numbers(self, left: str, operator: str, right: str) -> ConditionVerdict:
        unknowns = self.scope.unknowns
        ground: Ground = "sure"
        cause = unknowns.alone(left)
        if cause is not None and cause.kind == "unset" and cause.name == "#":
            left, ground = "0", "no arguments"
        try:
            first, second = evaluate_in(left or "0", self.scope), evaluate_in(right or "0", self.scope)
        except UnknownNumberError:
            return UNDECIDED
        table = {
            "==": first == second,
            "!=": first != second,
            "<": first < second,
            "<=": first <= second,
            ">": first > second,
            ">=": first >= second,
        }
        return ConditionVerdict(table[NUMERIC[operator]], ground)

    def _regex(self, text: str, pattern: str) -> ConditionVerdict:
        """Match a pattern, if Python reads it the same way and it matches in one pass; else undecided."""
        if not re.fullmatch(r"\^?(?:[\w .,:/=-]|\\\.|\[[\w^-]+\]\+?|\.\*)*\$?", pattern) or pattern.count("*") > 2:
            return UNDECIDED
        try:
            return ConditionVerdict(re.search(pattern, text[:1000]) is not None)
        except re.error:
            return UNDECIDED
