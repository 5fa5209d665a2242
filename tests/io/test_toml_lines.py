"""Lines of keys: whatever way TOML lets a person write them."""

from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.io.toml import MOST_DEPTH, TooDeep, key_lines, split_key

TRICKY = '''\
# a = 1   a comment is not a key
top = "x # not a comment"
dotted.inner . "quoted key" = 1
text = """
fake = 1
[fake.table]
""" # after
literal = \'\'\'
also = "fake"\'\'\'
"esc\\u0041ped" = 2

[table]  # comment
list = [
  1,   # = ]
  { inline = 2, deep = { x = [3] } },
]
ends = """four quotes""""
[[many]]
a = 1
[many.child]
b = 2
[[many]]
a = 3
[[many.child]]
c = 4
['lit.eral'.sub]
d = 1979-05-27T07:32:00Z
'''


def test_every_way_of_writing_a_key_has_its_line() -> None:
    tomllib.loads(TRICKY)  # the text is TOML
    lines = key_lines(TRICKY)
    expected = {
        ("top",): 2,
        ("dotted", "inner", "quoted key"): 3,
        ("text",): 4,
        ("literal",): 8,
        ("escAped",): 10,
        ("table",): 12,
        ("table", "list"): 13,
        ("table", "list", 0): 14,
        ("table", "list", 1, "inline"): 15,
        ("table", "list", 1, "deep", "x", 0): 15,
        ("table", "ends"): 17,
        ("many", 0, "a"): 19,
        ("many", 0, "child", "b"): 21,
        ("many", 1, "a"): 23,
        ("many", 1, "child", 0, "c"): 25,
        ("lit.eral", "sub", "d"): 27,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert not [path for path in lines if "fake" in path or "also" in path]


keys = st.text(min_size=1, max_size=6)
values = st.recursive(
    st.integers(-9, 9) | st.booleans() | st.text(max_size=8).map(lambda text: text.replace("\x7f", "")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",\n ".join(as_toml(item) for item in value) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def paths_of(value: object, prefix: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {prefix} | {path for key, item in items for path in paths_of(item, (*prefix, key))}


@given(st.dictionaries(keys, values, max_size=4))
def test_every_key_of_any_document_is_found(document: dict[str, object]) -> None:
    text = "".join(f"{quoted(key)} = {as_toml(value)}\n" for key, value in document.items())
    assume_toml = tomllib.loads(text)
    assert set(key_lines(text)) == paths_of(assume_toml) - {()}


@given(st.text(max_size=200))
def test_noise_never_breaks_the_scanner(text: str) -> None:
    try:
        found = key_lines(text)
    except TooDeep:
        pytest.fail("200 characters of noise reached the depth limit")
    assert all(1 <= line <= text.count("\n") + 1 for line in found.values())


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000, "a = " + "{a = " * 5000, ".".join("a" * 5000) + " = 1", "[" + ".".join("a" * 5000) + "]"],
)
def test_deep_nesting_is_refused_at_its_line(text: str) -> None:
    with pytest.raises(TooDeep) as caught:
        key_lines("\n\n" + text)
    assert caught.value.line == 3


def test_depth_limit_leaves_room_for_honest_files() -> None:
    assert key_lines("a = " + "[" * (MOST_DEPTH - 2) + "]" * (MOST_DEPTH - 2))


@pytest.mark.parametrize("text", ['a = """' + 'x"" ' * 50_000, 'a = "' + "\\a" * 50_000, "a = '''" + "x'' " * 50_000])
def test_unclosed_strings_cost_linear_time(text: str) -> None:
    assert key_lines(text) == {("a",): 1}  # a quadratic pattern would take minutes


def test_split_key() -> None:
    assert split_key("parallel.tensor") == ("parallel", "tensor")
    assert split_key("a b") is None
    assert split_key("") is None
