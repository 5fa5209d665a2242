"""One word per thing (docs/glossary.md): dropped words stay out of messages and manual, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md")) + sorted(DOCS.glob("simulation/*.md")) + sorted(DOCS.glob("rules/*.md"))
# A word to look for, how it is used wrongly, and what to say instead; each stands in the last column of the glossary.
DROPPED = (
    ("vault", r"(?<![-_])\bvaults?\b", "in-memory checkpoint, replica"),
    ("budd", r"\bbudd(?:y|ies)\b", "peer"),
    ("formation", r"\bformations?\b", "membership"),
    ("council", r"\bcouncil\b", "coordinator"),
    ("seat", r"\bseats?\b", "slot"),
    ("fall", r"\b(?:rank|host|process)e?s? (?:that )?falls?\b|\bfallen (?:rank|host)", "fail"),
    ("fell", r"\b(?:rank|host|process)e?s? (?:that )?fell\b", "failed"),
    ("epoch", r"\bepochs? (?:\d|$)", "generation"),  # a number follows; in an f-string the text ends before it
    ("counts with", r"\bcounts with\b", "assumes"),
    ("time that shows", r"\btime that shows\b", "exposed communication"),
    ("nothing beats these", r"\bnothing beats these\b", "Pareto front"),
)
PATTERNS = {word: re.compile(pattern, re.IGNORECASE) for word, pattern, _ in DROPPED}
# A number and its noun, perhaps with a word between them.
NUMBER = re.compile(
    r"(?<![+−] )(?<![\d.,–·×-])\b1 (?:checkpoint |earlier )?(?:ranks|hosts|steps|faults|runs|files|layouts|errors|"
    r"warnings|checkpoints|tokens|intervals|sources|terms|micro-batches|remarks|designs|fabrics|names|lines|devices|GPUs|"
    r"jobs|nodes|rules|slots|agents|samples|sequences|days|hours|minutes|seconds|restarts|failures)\b"
)


def dropped_words(text: str) -> list[str]:
    """What a text says that it should not, with what to say instead."""
    lower = text.lower()
    found = [
        (match.group(), say) for word, _, say in DROPPED if word in lower for match in PATTERNS[word].finditer(text)
    ]
    return [f"{word.strip()!r}: say {say}" for word, say in found]


def spoken_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a source file in which somebody speaks: string constants with a space, docstrings among them."""
    source = path.read_text(encoding="utf-8")
    if not dropped_words(source) and "epoch {" not in source:  # most files; parsing all of them takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def test_messages_use_the_words_of_the_glossary() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, text in spoken_texts(path)
        for word in dropped_words(text)
    ]
    assert wrong == []


def test_the_manual_uses_the_words_of_the_glossary() -> None:
    wrong = []
    for page in PAGES:
        text = re.sub(r"\]\([^)]*\)|`[^`\n]*`", "", page.read_text(encoding="utf-8"))  # neither links nor names of keys
        found = dropped_words(text) if page.name != "glossary.md" else []
        wrong += [f"{page.name}: {word}" for word in (*found, *NUMBER.findall(text))]
    assert wrong == []


def test_what_is_dropped_stands_in_the_glossary() -> None:
    rows = [line.split("|") for line in (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    listed = " ".join(row[3] for row in rows if len(row) > 4)
    for word in (
        "vault",
        "buddy",
        "formation",
        "council",
        "seat",
        "fell",
        "epoch",
        "counts with",
        "nothing beats these",
    ):
        assert word in listed, word


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading.

    >>> slug("## `phalanx watch RUN`"), slug("## Before a host takes part")
    ('phalanx-watch-run', 'before-a-host-takes-part')
    """
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).strip().replace(" ", "-")


def test_links_of_the_manual_lead_somewhere() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    anchors = {page: {slug(line) for line in text.splitlines() if line.startswith("#")} for page, text in texts.items()}
    lost = []
    for page, text in texts.items():
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            is_lost = not there.exists() or (there in anchors and anchor and anchor not in anchors[there])
            lost += [f"{page.name}: {target}"] if is_lost else []
    assert lost == []


# Words of earlier metaphors, which nobody understands in a name. `room` is allowed where it is free space.
UNCLEAR_WORDS = frozenset({"room", "hall", "council", "hearing", "wish", "wishes", "told", "story", "fieldwork"})
FREE_SPACE = frozenset({"room", "make_room", "deleted_for_room"})


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Classes, functions, arguments, and fields of classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def is_unclear(name: str) -> bool:
    """Whether a word of a name in snake_case or CamelCase needs decoding.

    >>> [is_unclear(name) for name in ("_OneWish", "told_s", "history", "headroom", "make_room")]
    [True, True, False, False, False]
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return name.strip("_") not in FREE_SPACE and not UNCLEAR_WORDS.isdisjoint(words)


def test_names_need_no_decoding() -> None:
    wrong = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lower = source.lower()
        if any(word in lower for word in UNCLEAR_WORDS):  # parsing all files takes seconds
            found = defined_names(ast.parse(source))
            wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in found if is_unclear(name)]
    assert wrong == []


def test_no_two_classes_share_a_name() -> None:
    """Who reads a traceback, or searches for a class, finds one."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.M):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert found
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


# A verb of the command line is named as the module it calls; the others of one name do the same thing elsewhere.
ALIKE_FILES = {"adamw", "html", "preflight", "probe", "settings", "text", "timeline"}


def test_files_of_one_name_are_alike() -> None:
    """Who reads `node.py:71` in a traceback or a commit knows which file that is."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src/phalanx").rglob("*.py")):
        if path.stem not in ("__init__", "__main__") and path.parent.name != "cli":
            found.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert found
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in ALIKE_FILES} == {}


def test_source_files_named_in_the_manual_of_simulation_exist() -> None:
    names = {path.name for folder in ("src", "benchmarks", ".ci") for path in (ROOT / folder).rglob("*.py")}
    for page in [*sorted(DOCS.glob("simulation/*.md")), DOCS / "planning.md", DOCS / "development.md"]:
        said = set(re.findall(r"\b([a-z_0-9]+\.py)\b", page.read_text(encoding="utf-8"))) - {"file.py", "conftest.py"}
        assert {name for name in said if name not in names and not name.startswith("test_")} == set(), page.name


def test_unclear_names_are_found() -> None:
    tree = ast.parse("class Wishes:\n    told: int\n    def hearing(self, story): self._room = self._hall = 1\n")
    found = {name for _, name in defined_names(tree) if is_unclear(name)}
    assert found == {"Wishes", "told", "hearing", "story", "_hall"}
