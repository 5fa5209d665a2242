"""An option with one value is given once: argparse alone would take the last and say nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

import pytest

from phalanx.cli.main import VERBS, main
from phalanx.cli.parser import OnOff, Parser, StoreOnce
from phalanx.errors import UserError


def parser_of(verb: str) -> Parser:
    parser = Parser(prog=f"phalanx {verb}")
    import_module(VERBS[verb][0]).configure_parser(parser)
    return parser


def with_subverbs(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from with_subverbs(inner)


def words_of(action: argparse.Action) -> list[str]:
    """An option with values that its type and choices take."""
    value = str(next(iter(action.choices))) if action.choices else "1"
    count = action.nargs if isinstance(action.nargs, int) else 1
    return [action.option_strings[-1], *[value] * count]


def test_no_option_with_one_value_is_taken_twice() -> None:
    seen = 0
    for parser in (one for verb in VERBS for one in with_subverbs(parser_of(verb))):
        assert isinstance(parser, Parser)
        for action in (one for one in parser._actions if one.option_strings):
            repeatable = argparse._AppendAction | argparse._StoreConstAction | argparse._HelpAction
            if isinstance(action, repeatable):
                continue
            assert isinstance(action, StoreOnce | OnOff), action
            words = words_of(action) if isinstance(action, StoreOnce) else action.option_strings[:1]
            again = words if isinstance(action, StoreOnce) else action.option_strings[1:2]
            with pytest.raises(UserError) as caught:
                parser.parse_known_args([*words, *again])
            message = str(caught.value)
            assert message.startswith(f"{parser.prog}: {words[0]}"), action
            assert f" and {again[0]}" in message, action
            assert " are both given\n" in message, action
            seen += 1
    assert seen > 100


def test_the_second_cluster_is_not_used_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.toml", "--cluster", "8xH100:1", "--cluster", "8xH100:2"]) == 2
    assert capsys.readouterr().err == (
        "phalanx plan: --cluster 8xH100:1 and --cluster 8xH100:2 are both given\n"
        "  they set the same thing, and only one can hold\n"
        "  leave one of them out\n"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--set", "optim.lr=1", "--set", "optim.lr=2"], "--set optim.lr=1 and --set optim.lr=2 are both given"),
        (
            ["--cluster", "local:2", "--set", "cluster.spec=local:4"],
            "--cluster local:2 and --set cluster.spec=local:4 are both given",
        ),
        (["--steps", "5", "--set", "data.tokens=1k"], "--steps 5 and --set data.tokens=1k are both given"),
    ],
)
def test_a_setting_is_given_in_one_way(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.toml", *given]) == 2
    assert told in capsys.readouterr().err


def test_what_may_be_repeated() -> None:
    parser = parser_of("train")
    found = parser.parse_args(["job.toml", "--set", "a.b=1", "--set", "a.c=2", "--set", "a.b=1", "--json", "--json"])
    assert found.overrides == ["a.b=1", "a.c=2", "a.b=1"]
    assert parser.parse_args(["job.toml", "--steps", "5"]).steps == 5, "a parser may be used again"
    assert parser.parse_args(["job.toml", "--steps", "6"]).steps == 6


def test_a_verb_of_a_verb_says_what_it_does() -> None:
    parser = Parser(prog="phalanx")
    verbs = parser.add_subparsers()
    assert verbs.add_parser("build", help="build a dataset").description == "build a dataset"
    assert verbs.add_parser("verify").description is None
    assert verbs.add_parser("show", help="short", description="longer").description == "longer"
