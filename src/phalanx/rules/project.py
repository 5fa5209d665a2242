"""A repository of configurations: its `.phalanx.toml`, and the files in it that can be checked."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.errors import PhalanxError, UserError, mistake, nearest
from phalanx.io.files import read_head
from phalanx.io.path_probes import is_file, path_exists, resolve_path
from phalanx.io.toml import TomlFile, read_toml
from phalanx.rules.foreign.detect import TrainsNothingError, trainer_of_file

CONFIG_NAME = ".phalanx.toml"
ENDINGS = (".toml", ".json", ".yaml", ".yml", ".sh", ".bash", ".slurm", ".sbatch", ".args", ".txt", ".py")
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "site-packages", "venv", "env", "build", "dist"})
MOST_FILES, MOST_DEPTH, MOST_BYTES = 50_000, 16, 2 << 20
# Words that only such files contain: a file that cannot be parsed and has any of them is reported as damaged.
MARKS = (b'"zero_optimization"', b'"train_micro_batch_size_per_gpu"', b"--tensor-model-parallel-size", b"[parallelism]")
OUR_WORDS = frozenset(
    {"model", "batch", "parallel", "cluster", "data", "optim"}
)  # sections of a job file; one has at least two of them


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """Options of `phalanx check` that apply to some files; empty means not set."""

    cluster: str = ""
    overrides: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    source: str = ""
    skip: bool = False  # these files are not checked at all


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectConfig:
    """A `.phalanx.toml`: settings for all files and for those that match a pattern, own rules, and a baseline."""

    file: Path | None = None
    everywhere: CheckSettings = CheckSettings()
    paths: tuple[tuple[str, CheckSettings], ...] = ()
    rules: tuple[str, ...] = ()
    baseline: str = ""

    @property
    def folder(self) -> Path:
        """The folder to which the patterns and paths are relative."""
        return self.file.parent if self.file is not None else Path()

    def settings_for(self, path: Path, *, foreign: bool) -> CheckSettings:
        """Return the settings for a file: later tables override earlier ones; `ignore` and `set` accumulate.

        The project-wide `cluster` and `set` apply only to other trainers' files: a Phalanx job names its own
        cluster.
        """
        settings = self.everywhere if foreign else replace(self.everywhere, cluster="", overrides=())
        name = os.path.relpath(resolve_path(path), resolve_path(self.folder)).replace(os.sep, "/")
        for pattern, overrides in self.paths:
            if not matches_pattern(name, pattern):
                continue
            settings = CheckSettings(
                cluster=overrides.cluster or settings.cluster,
                overrides=(*settings.overrides, *overrides.overrides),
                select=overrides.select or settings.select,
                ignore=(*settings.ignore, *overrides.ignore),
                source=overrides.source or settings.source,
                skip=overrides.skip or settings.skip,
            )
        return settings


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a relative path: all of it, its folder, or (without a slash) one name in it.

    >>> matches_pattern("a/b/c.json", "a/*"), matches_pattern("a/b/c.json", "c.json"), matches_pattern("ab.sh", "a/")
    (True, True, False)
    """
    if "/" not in pattern:
        return any(fnmatch.fnmatchcase(name_part, pattern) for name_part in name.split("/"))
    return fnmatch.fnmatchcase(name, pattern.rstrip("/")) or name.startswith(pattern.rstrip("*"))


def find_config(start: Path) -> ProjectConfig:
    """Return the nearest `.phalanx.toml` from a folder up to the root of its repository, or an empty configuration."""
    folder = resolve_path(start)
    for place in (folder, *folder.parents):
        if is_file(place / CONFIG_NAME):
            return read_config(place / CONFIG_NAME)
        if path_exists(place / ".git"):
            break
    return ProjectConfig()


def read_config(path: Path) -> ProjectConfig:
    """Read a `.phalanx.toml`; raises UserError with the line of the error."""
    toml = read_toml(path, noun="project file")
    _refuse_unknown(path, toml, (), toml.table, {"check"})
    table = _table_at(path, toml, ("check",), toml.table.get("check", {}))
    _refuse_unknown(path, toml, ("check",), table, {*KEYS, "rules", "baseline", "path"})
    tables = table.get("path", [])
    if not isinstance(tables, list):
        raise _wrong(path, toml, ("check", "path"), "is not a list of tables", 'write [[check.path]] and match = "…"')
    paths = []
    for number, entry in enumerate(tables):
        place: tuple[str | int, ...] = ("check", "path", number)
        inner = _table_at(path, toml, place, entry)
        _refuse_unknown(path, toml, place, inner, {*KEYS, "match", "skip"})
        pattern = _text_at(path, toml, (*place, "match"), inner.get("match", ""))
        if not pattern:
            raise _wrong(path, toml, place, "says no match", 'match = "configs/*.json"')
        paths.append((pattern, _settings_of(path, toml, place, inner)))
    return ProjectConfig(
        file=path,
        everywhere=_settings_of(path, toml, ("check",), table),
        paths=tuple(paths),
        rules=_texts_at(path, toml, ("check", "rules"), table.get("rules", [])),
        baseline=_text_at(path, toml, ("check", "baseline"), table.get("baseline", "")),
    )


KEYS = {"cluster": "cluster", "set": "overrides", "select": "select", "ignore": "ignore", "from": "source"}


def _settings_of(
    path: Path, found: TomlFile, place: tuple[str | int, ...], table: Mapping[str, object]
) -> CheckSettings:
    skip = table.get("skip", False)
    if not isinstance(skip, bool):
        raise _wrong(path, found, (*place, "skip"), "is not true or false", "skip = true")
    return CheckSettings(
        cluster=_text_at(path, found, (*place, "cluster"), table.get("cluster", "")),
        overrides=_texts_at(path, found, (*place, "set"), table.get("set", [])),
        select=_texts_at(path, found, (*place, "select"), table.get("select", [])),
        ignore=_texts_at(path, found, (*place, "ignore"), table.get("ignore", [])),
        source=_text_at(path, found, (*place, "from"), table.get("from", "")),
        skip=skip,
    )


def _table_at(path: Path, found: TomlFile, place: tuple[str | int, ...], value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _wrong(path, found, place, "is not a table", "write [check], and [[check.path]] for some files")
    return value


def _text_at(path: Path, found: TomlFile, place: tuple[str | int, ...], value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise _wrong(path, found, place, "is not a text", 'as cluster = "8xH100:16"')
    return value


def _texts_at(path: Path, found: TomlFile, place: tuple[str | int, ...], value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > 1000:
        raise _wrong(path, found, place, "is not a list of texts", 'as ignore = ["TEL", "CKP001"]')
    return tuple(_text_at(path, found, place, item) for item in items)


def _refuse_unknown(
    path: Path, found: TomlFile, place: tuple[str | int, ...], table: Mapping[str, object], known: set[str]
) -> None:
    for key in table:
        if key not in known:
            close = nearest(key, known)
            fix = f"did you mean {close}?" if close else f"known keys: {', '.join(sorted(known))}"
            # Most files begin with such a key.
            if not place and key in KEYS:
                fix = f"write it below a line [check]: {key} is a key of that table"
            raise _wrong(path, found, (*place, key), "is an unknown key", fix)


def _wrong(path: Path, found: TomlFile, place: tuple[str | int, ...], what: str, fix: str) -> UserError:
    line = found.lines.get(place) or found.lines.get(place[:-1]) or 0
    where = f"{path}:{line}" if line else str(path)
    return mistake(where, f"{'.'.join(str(key) for key in place)} {what}", fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFiles:
    """Files of a folder that can be checked, in order, and the number of files visited."""

    files: tuple[Path, ...]
    looked_at: int = 0
    left_off: bool = False  # there were more than MOST_FILES files
    unread: tuple[PhalanxError, ...] = field(default=())


def find_files(folder: Path, config: ProjectConfig) -> FoundFiles:
    """Return job files, plans and other trainers' configurations below a folder.

    The search is bounded; links and run folders are skipped.
    """
    files, looked_at, left_off = [], 0, False
    for path in _walk_files(folder):
        looked_at += 1
        if looked_at > MOST_FILES:
            left_off = True
            break
        settings = config.settings_for(path, foreign=True)
        if not settings.skip and (settings.source or can_judge(path)):
            files.append(path)
    return FoundFiles(files=tuple(files), looked_at=looked_at, left_off=left_off)


def _walk_files(folder: Path) -> Iterator[Path]:
    from phalanx.record.run_files import has_events

    for root, folders, files in os.walk(folder):
        depth = len(Path(root).relative_to(folder).parts)
        is_run = has_events(files)
        subfolders = [
            name
            for name in sorted(folders)
            if not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
            and not os.path.islink(os.path.join(root, name))
        ]
        # Assigning in place limits where os.walk descends.
        folders[:] = [] if is_run or depth >= MOST_DEPTH else subfolders
        if is_run:
            continue
        for name in sorted(files):
            path = Path(root, name)
            if path.suffix.lower() in ENDINGS and not name.startswith(".") and not path.is_symlink() and is_file(path):
                yield path


def recipe_targets(path: Path, overrides: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Return a file and its targets: each recipe of a Python file, unless the user chose one."""
    from phalanx.rules.gather import split_recipe

    file, name = split_recipe(str(path))
    if file == str(path) and path.suffix == ".py" and not any(override.startswith("recipe=") for override in overrides):
        from phalanx.rules.foreign.python_config.recipes import recipes_of

        try:
            names = recipes_of(path)
        except PhalanxError:  # reported when the file is checked
            names = ()
        return path, tuple(f"{path}::{recipe}" if recipe else str(path) for recipe in names) or (str(path),)
    return Path(file), (f"{file}::{name}" if name else str(path),)


def can_judge(path: Path) -> bool:
    """Return whether a file is a job, a plan or a configuration of a trainer, or a damaged one."""
    from phalanx.rules.gather import is_plan

    try:
        if path.stat().st_size > MOST_BYTES:
            return False
        if path.suffix == ".py":  # most are programs, even if they contain such words
            from phalanx.rules.foreign.python_config.recipes import family_of_python

            return bool(family_of_python(path))
        if path.suffix == ".txt" and not _is_argument_list(path):
            return False
        if is_plan(path) or trainer_of_file(path):
            return True
        return path.suffix == ".toml" and is_job_file(path)
    except TrainsNothingError:
        return False
    except PhalanxError:
        # Damaged, or of an unknown trainer: a file with a trainer's words is reported, not skipped.
        return path.suffix != ".py" and any(mark in read_head(path, MOST_BYTES) for mark in MARKS)
    except (OSError, ValueError):
        return False


ARGUMENTS = re.compile(rb"(--[a-z]|torchrun |python3? |deepspeed |srun |#!)")


def _is_argument_list(path: Path) -> bool:
    """Return whether a text begins with arguments or a command; notes and logs may contain arguments further on."""
    lines = (line.strip() for line in read_head(path, 4096).splitlines())
    first = next((line for line in lines if line and (line.startswith(b"#!") or not line.startswith(b"#"))), b"")
    return ARGUMENTS.match(first) is not None


def is_job_file(path: Path) -> bool:
    """Return whether a TOML file is a Phalanx job: it has `spec` or `name`, and at least two sections of a job."""
    if b"=" not in read_head(path, 4096):
        return False
    table = read_toml(path, noun="job file").table
    sections = sum(isinstance(table.get(name), dict) for name in OUR_WORDS)
    return sections >= 2 and (isinstance(table.get("spec"), str) or isinstance(table.get("name"), str))
