"""State of one conversion: the leaves of another trainer's file, how each was used, and the values for the job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.errors import Problem, mistake
from phalanx.job.key_rules import shown_value, value_kind
from phalanx.rules.evidence import NO_WORD

MOST = 1e18  # more than any count of tokens
MAX_NUMBER_CHARACTERS = 1000  # checked to decide whether a text is a number
UNSET = "a variable that nothing sets"
# Upper bound of a job's seed: its value does not change the work of a step
SEEDS = 10**9
NEVER = 0  # steps between checkpoints if none are written

Fate = Literal["mapped", "irrelevant", "unmapped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetting:
    """A value of the job: its source, and how it was converted."""

    value: object
    key: str = ""  # of the leaf; empty for a default of the trainer
    note: str = ""
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledKey:
    """The use of a leaf; `text` is the job key it was mapped to, or the reason why it was not mapped."""

    fate: Fate
    text: str


@dataclass(kw_only=True, slots=True)
class Conversion:
    """A conversion in progress, filled by one reader.

    Attributes:
        file: Path of the configuration.
        title: Name of the trainer, such as "Megatron-LM".
        leaves: Settings of the file by key.
        names: A reader's name -> the key that the file uses for it.
        read_as: A reader's name -> a leaf whose value has been rewritten.
        values: Job key -> its setting.
        settled: Key of a leaf -> its use.
        unreadable: Leaves that were read as numbers and are not.
        unknown: Job key -> the reason why its value is not known.
        open_why: Reason why settings that the file leaves out may still be given elsewhere.
        missing: Missing information without which no plan can be made.
        machines: Hosts, and devices of each; 0 if not given.
        theirs: Job key -> the trainer's key that sets it.
        practice: Default behaviours of the trainer that these settings change.
        notes: Remarks for the report that no rule judges.
    """

    file: str
    title: str
    leaves: Mapping[str, Leaf]
    names: dict[str, str] = field(default_factory=dict)
    read_as: dict[str, Leaf] = field(default_factory=dict)
    values: dict[str, JobSetting] = field(default_factory=dict)
    settled: dict[str, SettledKey] = field(default_factory=dict)
    unreadable: dict[str, Leaf] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    open_why: str = ""
    missing: list[Problem] = field(default_factory=list)
    machines: tuple[int, int] = (0, 0)
    theirs: dict[str, str] = field(default_factory=dict)
    practice: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def find_leaf(self, name: str) -> Leaf | None:
        """Return the leaf of a name; a null leaf counts as absent."""
        key = self.names.get(name, name)
        leaf = self.read_as.get(name) or self.read_as.get(key) or self.leaves.get(key)
        return leaf if leaf is not None and leaf.value is not None else None

    def has_leaf(self, name: str) -> bool:
        """Return whether the file has a value under this name."""
        return self.find_leaf(name) is not None

    def read_whole(self, name: str) -> int | None:
        """Return a whole number; any other value is listed as unmapped and counts as absent."""
        value = self.read_number(name)
        if value is None or value.is_integer():
            return None if value is None else int(value)
        self.leave_unmapped(name, "is not a whole number")
        return None

    def read_number(self, name: str) -> float | None:
        """Return a finite number, also from text such as 2e-4 in YAML and all values in an argument list."""
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
        """Return true or false, also from text."""
        leaf = self.find_leaf(name)
        if leaf is None or self._is_unknown(name, leaf):
            return None
        word = str(leaf.value).strip().lower()
        if word in ("true", "yes", "1", "on", "false", "no", "0", "off", "none"):
            return word in ("true", "yes", "1", "on")
        self.leave_unmapped(name, "is not true or false")
        return None

    def read_word(self, name: str) -> str:
        """Return a word in lower case; empty if the file has none."""
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
        """Set a value of the job, with the leaves `names` as its source."""
        sources = [leaf for name in names if name not in self.unreadable and (leaf := self.find_leaf(name)) is not None]
        first = sources[0] if sources else None
        if names:
            self.theirs[job_key] = first.key if first else self.names.get(names[0], names[0])
        unreadable = next((self.unreadable[name] for name in names if name in self.unreadable), None)
        if unreadable is not None and unreadable.unknown:
            self.unknown[job_key] = f"{unreadable.key} {unreadable.unknown}"
        elif names and first is None and unreadable is None and self.open_why:
            self.unknown[job_key] = self.open_why
        if first is None and unreadable is not None:
            note = self._lost_note(unreadable)
        elif first is None and not note.startswith("default of") and (names or not note):
            # The file could set it and does not
            note = self._default_note(note)
        self.values[job_key] = JobSetting(
            value=value, key=first.key if first else "", note=note, line=first.line if first else 0
        )
        for leaf in sources:
            self.settled[leaf.key] = SettledKey(fate="mapped", text=job_key)

    def assume_default(self, job_key: str, value: object, note: str = "") -> None:
        """Set the trainer's default for a job key that the file leaves out, where Phalanx's default differs."""
        if job_key not in self.values:
            foreign_key = self.theirs.get(job_key)
            unreadable = next((leaf for leaf in self.unreadable.values() if leaf.key == foreign_key), None)
            self.values[job_key] = JobSetting(
                value=value, note=self._default_note(note) if unreadable is None else self._lost_note(unreadable)
            )

    def _default_note(self, note: str) -> str:
        """Return the note of a default, which counts like a written value: leaving a key out chooses its default."""
        return f"default of {self.title}" + (f": {note}" if note else "")

    def _lost_note(self, leaf: Leaf) -> str:
        """Return the note of a number that replaces an unreadable value, and by which no rule may judge."""
        return f"in place of {value_text(leaf.key)}, which is not readable"

    def skip_leaf(self, name: str, reason: str) -> None:
        """Settle a leaf as irrelevant to every rule."""
        self._settle_leaf(name, SettledKey(fate="irrelevant", text=reason))

    def leave_unmapped(self, name: str, why: str) -> None:
        """Settle a leaf for which the job schema has no key."""
        self._settle_leaf(name, SettledKey(fate="unmapped", text=why))

    def mark_used(self, *names: str, by: str) -> None:
        """Settle leaves that were used for another value."""
        for name in names:
            self._settle_leaf(name, SettledKey(fate="mapped", text=by))

    def _settle_leaf(self, name: str, settled: SettledKey) -> None:
        key = self.read_as[name].key if name in self.read_as else self.names.get(name, name)
        if key in self.leaves:
            self.settled[key] = settled

    def rename_leaf(self, name: str, key: str, value: object = None) -> None:
        """Read the leaf of `key` under a reader's name, with another value if the file expresses it differently."""
        leaf = self.leaves.get(key)
        if leaf is not None and leaf.value is not None and not self.has_leaf(name):
            self.read_as[name] = replace(leaf, value=leaf.value if value is None else value)

    def add_missing(self, what: str, fix: str) -> None:
        """Record missing information without which no plan can be made."""
        self.missing.append(Problem(where=self.file, what=what, fix=fix))

    def job_value(self, job_key: str) -> object:
        """Return the job's value so far, or None."""
        setting = self.values.get(job_key)
        return setting.value if setting is not None else None

    def int_of(self, job_key: str, default: int = 1) -> int:
        """Return the job's value as a whole number, or the default."""
        value = self.job_value(job_key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    # ---- tables of keys ----------------------------------------------------------------------------------------------

    def copy_keys(self, table: Mapping[str, tuple[str, Callable[[Conversion, str], object]]]) -> None:
        """Copy keys that only change their name: name -> (job key, method that reads it)."""
        for name, (job_key, read) in table.items():
            self.theirs[job_key] = self.names.get(name, name)
            value = read(self, name)
            if value is not None and value != "":
                self.set_value(job_key, value, name)

    def settle_rest(
        self, *, irrelevant: Mapping[str, str], unmapped: Mapping[str, str], seen: Callable[[str], str]
    ) -> None:
        """Settle every remaining leaf by the longest table entry that matches its key, as converted by `seen`."""
        for key, leaf in self.leaves.items():
            if key in self.settled:
                continue
            if leaf.value is None:
                self.settled[key] = SettledKey(fate="irrelevant", text=f"null leaves it to {self.title}")
            elif (name := found_in(seen(key), [*unmapped, *irrelevant])) in unmapped:
                # A disabled option needs no job key
                fate: Fate = "irrelevant" if leaf.value is False else "unmapped"
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
    """Return whether a value is a number, including infinite, NaN and huge ones.

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
    """Return the longest entry that equals the key, or ends in "." or "_" and is its prefix; empty if there is none."""
    fits = (entry for entry in entries if key == entry or (entry[-1] in "._" and key.startswith(entry)))
    return max(fits, key=len, default="")


def value_text(value: object) -> str:
    """Format a foreign value for messages: short, and without control characters."""
    text = (
        "null" if value is None else shown_value(value) if isinstance(value, bool | int | float | str | list) else "{}"
    )
    return "".join(character if character.isprintable() else "?" for character in text)


# The trainer's own key for a key of the job: a suggested fix must use the words of the file.


# Intermediate keys that a reader sets until the world size is known, and the key of the job they become.
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
    """Return job key -> its text for messages, such as "torchtitan: comm.train_timeout_seconds".

    >>> their_keys({"train.timeout_s": "distributed_timeout_minutes"}, title="Megatron-LM", arguments=True)
    {'train.timeout_s': 'Megatron-LM: --distributed-timeout-minutes, in minutes'}
    """
    texts = {}
    for key, name in theirs.items():
        foreign_key = name
        if arguments and not name.startswith(("--", "env.")):
            foreign_key = "--" + name.replace("_", "-")
        unit = UNITS.get(foreign_key.rpartition(".")[2].removeprefix("--"), "")
        texts[OPEN.get(key, key)] = f"{title}: {foreign_key}" + (f", {unit}" if unit else "")
    return texts


# One setting of another trainer's configuration: its key, its value, and its line.


MOST_LEAVES = 5_000  # a full Megatron-Bridge dump has about 600
MOST_DEPTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A scalar, a list of scalars, or an empty table. `key` is dotted, or an argument as it was written."""

    key: str
    value: object
    line: int  # from 1; 0 is the file as a whole
    unknown: str = ""  # why its value is not known; `value` then only shows how it is written
    comment: str = ""  # the comment on its line, for settings that need a reason
    # Line on which the same key has another value, which this one overrides; 0 if there is none
    earlier: int = 0
    twice: str = ""  # the key given twice, of a table that contains this leaf


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig:
    """The leaves of a file; `open_why` is the reason why settings it leaves out may still be given."""

    leaves: dict[str, Leaf]
    open_why: str = ""
    notes: tuple[str, ...] = ()


def leaves_of(table: object, *, file: str, line: Callable[[tuple[str | int, ...]], int]) -> dict[str, Leaf]:
    """Return all leaves of nested tables and lists; raise UserError if there are too many or they are too deep."""
    leaves: dict[str, Leaf] = {}
    for path, value in _walk_values(table, (), file):
        key = ".".join(str(step) for step in path)
        leaves[key] = Leaf(key=key, value=value, line=line(path))
        if len(leaves) > MOST_LEAVES:
            raise mistake(file, f"holds more than {MOST_LEAVES:,} settings", why="no training configuration does")
    return leaves


def _walk_values(
    value: object, path: tuple[str | int, ...], file: str
) -> Iterator[tuple[tuple[str | int, ...], object]]:
    if len(path) > MOST_DEPTH:
        raise mistake(file, f"nests deeper than {MOST_DEPTH} levels", why="no training configuration does")
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _walk_values(inner, (*path, str(name)), file)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, inner in enumerate(value):
            yield from _walk_values(inner, (*path, index), file)
    elif path:
        yield path, value
