"""One conversion: the leaves of another trainer's file, what became of each, and the values the job will have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.errors import Problem, mistake
from phalanx.job.key_rules import shown_value, value_kind
from phalanx.rules.evidence import NO_WORD

MOST = 1e18  # beyond any count of tokens
MAX_NUMBER_CHARACTERS = 1000  # by which a text is known to be a number
UNSET = "a variable that nothing sets"
SEEDS = 10**9  # a job has no larger one: which it is does not change the work of a step
NEVER = 0  # steps between checkpoints where none are made

Fate = Literal["mapped", "irrelevant", "unmapped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetting:
    """A value of the job: where it comes from, and how it was converted."""

    value: object
    key: str = ""  # of the leaf; empty for a default of the trainer
    note: str = ""
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledKey:
    """What became of a leaf; `text` is the job key it went to, or the reason it went nowhere."""

    fate: Fate
    text: str


@dataclass(kw_only=True, slots=True)
class Conversion:
    """Filled by one reader; `names` are words a reader uses for leaves that the file spells differently."""

    file: str
    title: str  # of the trainer, as "Megatron-LM"
    leaves: Mapping[str, Leaf]
    names: dict[str, str] = field(default_factory=dict)
    read_as: dict[str, Leaf] = field(default_factory=dict)  # name -> a leaf with its value put into other words
    values: dict[str, JobSetting] = field(default_factory=dict)
    settled: dict[str, SettledKey] = field(default_factory=dict)
    unreadable: dict[str, Leaf] = field(default_factory=dict)  # asked for as numbers, and none
    unknown: dict[str, str] = field(default_factory=dict)  # job key -> why its value is not known
    open_why: str = ""  # why what the file leaves out may still be given
    missing: list[Problem] = field(default_factory=list)  # what no plan can be made without
    machines: tuple[int, int] = (0, 0)  # hosts and devices of each; 0 is not said
    theirs: dict[str, str] = field(default_factory=dict)  # job key -> the key that says it there
    practice: dict[str, object] = field(default_factory=dict)  # habits that these settings change
    notes: list[str] = field(default_factory=list)  # what a reader of the report should know, and no rule judges

    # ---- looking ----------------------------------------------------------------------------------------------------

    def find_leaf(self, name: str) -> Leaf | None:
        """The leaf of a name; a null one counts as absent."""
        key = self.names.get(name, name)
        leaf = self.read_as.get(name) or self.read_as.get(key) or self.leaves.get(key)
        return leaf if leaf is not None and leaf.value is not None else None

    def has_leaf(self, name: str) -> bool:
        """Whether the file says anything under this name."""
        return self.find_leaf(name) is not None

    def read_whole(self, name: str) -> int | None:
        """A whole number; one that is none is listed and counts as absent."""
        value = self.read_number(name)
        if value is None or value.is_integer():
            return None if value is None else int(value)
        self.leave_unmapped(name, "is not a whole number")
        return None

    def read_number(self, name: str) -> float | None:
        """A finite number, also where it stands as text, as 2e-4 does in YAML and everything in an argument list."""
        leaf = self.find_leaf(name)
        if leaf is None or self._is_unknown(name, leaf):
            return None
        value = _finite_number(leaf.value)
        if value is None:
            unset = isinstance(leaf.value, str) and "$" in leaf.value
            self.unreadable[name] = leaf
            self.leave_unmapped(name, UNSET if unset else f"is {value_kind(leaf.value)}, not a number")
        return value

    def read_flag(self, name: str) -> bool | None:
        """True or false, also as text."""
        leaf = self.find_leaf(name)
        if leaf is None or self._is_unknown(name, leaf):
            return None
        word = str(leaf.value).strip().lower()
        if word in ("true", "yes", "1", "on", "false", "no", "0", "off", "none"):
            return word in ("true", "yes", "1", "on")
        self.leave_unmapped(name, "is not true or false")
        return None

    def read_word(self, name: str) -> str:
        """A word in lower case; empty where the file says none."""
        leaf = self.find_leaf(name)
        if leaf is None or self._is_unknown(name, leaf):
            return ""
        return str(leaf.value).strip().lower()[:200]

    def _is_unknown(self, name: str, leaf: Leaf) -> bool:
        if leaf.unknown:
            self.unreadable[name] = leaf
            self.leave_unmapped(name, leaf.unknown)
        return bool(leaf.unknown)

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def set_value(self, job_key: str, value: object, *names: str, note: str = "") -> None:
        """The job says this, because of these leaves."""
        said = [leaf for name in names if name not in self.unreadable and (leaf := self.find_leaf(name)) is not None]
        first = said[0] if said else None
        if names:
            self.theirs[job_key] = first.key if first else self.names.get(names[0], names[0])
        lost = next((self.unreadable[name] for name in names if name in self.unreadable), None)
        if lost is not None and lost.unknown:
            self.unknown[job_key] = f"{lost.key} {lost.unknown}"
        elif names and first is None and lost is None and self.open_why:
            self.unknown[job_key] = self.open_why
        if first is None and lost is not None:
            note = self._lost_note(lost)
        elif first is None and not note.startswith("default of") and (names or not note):
            note = self._default_note(note)  # the file could say it and does not
        self.values[job_key] = JobSetting(
            value=value, key=first.key if first else "", note=note, line=first.line if first else 0
        )
        for leaf in said:
            self.settled[leaf.key] = SettledKey(fate="mapped", text=job_key)

    def assume_default(self, job_key: str, value: object, note: str = "") -> None:
        """The trainer's own default, where the file says nothing and ours differs."""
        if job_key not in self.values:
            spelled = self.theirs.get(job_key)
            lost = next((leaf for leaf in self.unreadable.values() if leaf.key == spelled), None)
            self.values[job_key] = JobSetting(
                value=value, note=self._default_note(note) if lost is None else self._lost_note(lost)
            )

    def _default_note(self, note: str) -> str:
        """As good as written: leaving a key out is how its default is chosen."""
        return f"default of {self.title}" + (f": {note}" if note else "")

    def _lost_note(self, leaf: Leaf) -> str:
        """A number holds the place of what the file does say, and nobody may judge by it."""
        return f"in place of {value_text(leaf.key)}, which is not readable"

    def skip_leaf(self, name: str, reason: str) -> None:
        """A leaf that no rule of the specification asks about."""
        self._settle_leaf(name, SettledKey(fate="irrelevant", text=reason))

    def leave_unmapped(self, name: str, why: str) -> None:
        """A leaf that the job schema has no word for."""
        self._settle_leaf(name, SettledKey(fate="unmapped", text=why))

    def mark_used(self, *names: str, by: str) -> None:
        """Leaves that went into another value."""
        for name in names:
            self._settle_leaf(name, SettledKey(fate="mapped", text=by))

    def _settle_leaf(self, name: str, settled: SettledKey) -> None:
        key = self.read_as[name].key if name in self.read_as else self.names.get(name, name)
        if key in self.leaves:
            self.settled[key] = settled

    def rename_leaf(self, name: str, key: str, value: object = None) -> None:
        """Read the leaf of `key` under a name of ours, with another value where it is said in other words."""
        leaf = self.leaves.get(key)
        if leaf is not None and leaf.value is not None and not self.has_leaf(name):
            self.read_as[name] = replace(leaf, value=leaf.value if value is None else value)

    def add_missing(self, what: str, fix: str) -> None:
        """Something that a plan cannot be made without, and the file does not say."""
        self.missing.append(Problem(where=self.file, what=what, fix=fix))

    def job_value(self, job_key: str) -> object:
        """What the job says so far."""
        said = self.values.get(job_key)
        return said.value if said is not None else None

    def int_of(self, job_key: str, default: int = 1) -> int:
        """The same, as a whole number."""
        value = self.job_value(job_key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    # ---- tables of words --------------------------------------------------------------------------------------------

    def copy_keys(self, table: Mapping[str, tuple[str, Callable[[Conversion, str], object]]]) -> None:
        """Keys that only change their name: name -> (job key, how it is read)."""
        for name, (job_key, read) in table.items():
            self.theirs[job_key] = self.names.get(name, name)
            value = read(self, name)
            if value is not None and value != "":
                self.set_value(job_key, value, name)

    def settle_rest(
        self, *, irrelevant: Mapping[str, str], unmapped: Mapping[str, str], seen: Callable[[str], str]
    ) -> None:
        """Settle every leaf that is left: of all entries that fit what `seen` makes of its key, the longest decides."""
        for key, leaf in self.leaves.items():
            if key in self.settled:
                continue
            if leaf.value is None:
                self.settled[key] = SettledKey(fate="irrelevant", text=f"null leaves it to {self.title}")
            elif (name := found_in(seen(key), [*unmapped, *irrelevant])) in unmapped:
                fate: Fate = "irrelevant" if leaf.value is False else "unmapped"  # what is off needs no word
                self.settled[key] = SettledKey(fate=fate, text=unmapped[name])
            elif name:
                self.settled[key] = SettledKey(fate="irrelevant", text=irrelevant[name])
            else:
                self.settled[key] = SettledKey(fate="unmapped", text=NO_WORD)


def _finite_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or len(str(value)[:100]) > 40:
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < MOST else None


def is_number_literal(value: object) -> bool:
    """Return whether a file says a number here, be it infinite, nan or beyond every count.

    >>> is_number_literal("9" * 400), is_number_literal("nan"), is_number_literal("$TP"), is_number_literal(True)
    (True, True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    if not isinstance(value, str):
        return True
    try:
        float(value[:MAX_NUMBER_CHARACTERS])
    except ValueError:
        return False
    return True


def found_in(key: str, entries: Iterable[str]) -> str:
    """Of the entries that are the key, or end in "." or "_" and begin it, the longest; empty where there is none."""
    fits = (entry for entry in entries if key == entry or (entry[-1] in "._" and key.startswith(entry)))
    return max(fits, key=len, default="")


def value_text(value: object) -> str:
    """A foreign value for a person: short, and without anything a terminal obeys."""
    text = (
        "null" if value is None else shown_value(value) if isinstance(value, bool | int | float | str | list) else "{}"
    )
    return "".join(one if one.isprintable() else "?" for one in text)


# The trainer's own key for a key of the job: a cure is of use only in the words of the file it is for.


# What a reader leaves open until the world is known, and the key of the job it becomes.
OPEN = {
    "checkpoint.steps": "checkpoint.interval_s",
    "data.steps": "data.tokens",
    "data.samples": "data.tokens",
    "optim.warmup_steps": "optim.warmup_tokens",
    "optim.warmup_samples": "optim.warmup_tokens",
    "batch.per_replica": "batch.global_sequences",
    "parallel.shard_copies": "parallel.shard",
}
UNITS = {
    "interval": "in steps",
    "save_interval": "in steps",
    "save-interval": "in steps",
    "every_n_train_steps": "in steps",
    "distributed_timeout_minutes": "in minutes",
    "distributed-timeout-minutes": "in minutes",
    "DEEPSPEED_TIMEOUT of the environment": "in minutes",
    "reduce_bucket_size": "in elements",
    "bucket_size": "in parameters",
    "ddp-bucket-size": "in parameters",
}


def their_keys(theirs: Mapping[str, str], *, title: str, arguments: bool) -> dict[str, str]:
    """Job key -> what to say of it, as "torchtitan: comm.train_timeout_seconds".

    >>> their_keys({"train.timeout_s": "distributed_timeout_minutes"}, title="Megatron-LM", arguments=True)
    {'train.timeout_s': 'Megatron-LM: --distributed-timeout-minutes, in minutes'}
    """
    found = {}
    for key, name in theirs.items():
        spelled = name
        if arguments and not name.startswith(("--", "env.")):
            spelled = "--" + name.replace("_", "-")
        unit = UNITS.get(spelled.rpartition(".")[2].removeprefix("--"), "")
        found[OPEN.get(key, key)] = f"{title}: {spelled}" + (f", {unit}" if unit else "")
    return found


# One setting of another trainer's configuration: its key, its value, and its line.


MOST_LEAVES = 5_000  # a full Megatron-Bridge dump has about 600
MOST_DEPTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A scalar, a list of scalars, or an empty table. `key` is dotted, or a flag as it was written."""

    key: str
    value: object
    line: int  # from 1; 0 is the file as a whole
    unknown: str = ""  # why its value is not known; `value` then only shows how it is written
    comment: str = ""  # what stands beside it, for settings that need a reason
    earlier: int = 0  # line on which the same key has another value, which this one overrules; 0 is nowhere
    twice: str = ""  # the key that stands there twice, of a table that holds this leaf


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig:
    """The leaves of a file; `open_why` says why what it leaves out may still be given."""

    leaves: dict[str, Leaf]
    open_why: str = ""
    notes: tuple[str, ...] = ()


def leaves_of(table: object, *, file: str, line: Callable[[tuple[str | int, ...]], int]) -> dict[str, Leaf]:
    """All leaves of nested tables and lists; raises UserError for more or deeper ones than a configuration has."""
    found: dict[str, Leaf] = {}
    for path, value in _walk_values(table, (), file):
        key = ".".join(str(part) for part in path)
        found[key] = Leaf(key=key, value=value, line=line(path))
        if len(found) > MOST_LEAVES:
            raise mistake(file, f"holds more than {MOST_LEAVES:,} settings", why="no training configuration does")
    return found


def _walk_values(
    value: object, path: tuple[str | int, ...], file: str
) -> Iterator[tuple[tuple[str | int, ...], object]]:
    if len(path) > MOST_DEPTH:
        raise mistake(file, f"nests deeper than {MOST_DEPTH} levels", why="no training configuration does")
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _walk_values(inner, (*path, str(name)), file)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for index, inner in enumerate(value):
            yield from _walk_values(inner, (*path, index), file)
    elif path:
        yield path, value
