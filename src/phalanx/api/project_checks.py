"""Check many files: a folder of configurations with its `.phalanx.toml`, and a baseline of findings that are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.checking import check
from phalanx.api.jobs import override_texts
from phalanx.api.results import Overrides, PublicResult, Tell, teller
from phalanx.errors import PhalanxError, mistake
from phalanx.io.path_probes import is_file, is_folder
from phalanx.io.tables import text_table
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.own_rules import RuleSource
    from phalanx.rules.project import ProjectConfig
    from phalanx.rules.run_rules import CheckReport

BASELINE_NAME = ".phalanx-baseline.json"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ProjectReport(PublicResult):
    """The reports of several files; `failures` are those that could not be read, `known` findings of the baseline."""

    reports: tuple[CheckReport, ...]
    failures: tuple[PhalanxError, ...] = ()
    looked_at: int = 0  # files of the folders that were searched
    searched: bool = False  # whether a folder was given
    written: str = ""  # the baseline that was written

    @property
    def known(self) -> int:
        """Findings that the baseline has."""
        from phalanx.rules.baseline import KNOWN

        return sum(one.reason == KNOWN for report in self.reports for one in report.findings)

    @property
    def exit_code(self) -> int:
        """That of the worst file; 0 where a baseline was written."""
        codes = [error.exit_code for error in self.failures]
        return max([0, *codes, *(0 if self.written else one.exit_code for one in self.reports)])

    def __str__(self) -> str:
        from phalanx.rules.formats.text import render_text

        pages = render_text([one for one in self.reports if one.problems or not self.searched])
        return "\n".join(part for part in (pages.rstrip("\n"), *self.table_lines()) if part)

    def table_lines(self) -> list[str]:
        """A row per file, where a folder was searched."""
        if not self.searched:
            return []
        from phalanx.rules.formats.text import counts_of

        rows = [("file", "errors", "warnings", "known", "unknown", "")]
        for report in self.reports:
            warnings = sum(one.severity == "warning" for one in report.problems)
            waived = sum(one.verdict == "waived" for one in report.findings)
            counts = (report.errors, warnings, waived, counts_of(report)["unknown"])
            errors, told, known, unknown = (str(one) for one in counts)
            rows.append((report.target, errors, told, known, unknown, "ok" if report.is_clean else "FAIL"))
        for error in self.failures:
            rows.append((error.problems[0].where, "", "", "", "", "cannot be read"))
        failing = sum(not one.is_clean for one in self.reports)
        last = (
            f"{plural(len(self.reports), 'file')} judged of {self.looked_at:,} looked at: {failing} with findings, "
            f"{len(self.failures)} that cannot be read; {plural(self.known, 'known finding')}"
        )
        return ["", *text_table(rows, right=(1, 2, 3, 4)), last]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "reports": [one.to_dict() for one in self.reports],
            "failures": [problem.render() for error in self.failures for problem in error.problems],
            "looked_at": self.looked_at,
            "known": self.known,
            "exit_code": self.exit_code,
        }


def check_project(
    *targets: str | Path,
    config: str | Path | None = None,
    baseline: str | Path | None = None,
    write_baseline: bool = False,
    skip_others: bool = False,
    overrides: Overrides = (),
    cluster: str | None = None,
    select: str = "",
    ignore: str = "",
    source: str = "",
    rules: Iterable[RuleSource] = (),
    allow_code: bool = False,
    progress: bool | Tell = False,
    **options: Any,
) -> ProjectReport:
    """Check files and folders as `phalanx check` does; in a folder, every file that can be judged.

    `config` is a project file; without it the nearest `.phalanx.toml` above each target counts. What is given here goes
    before what stands there. The rules that a project file names are run with `allow_code` only. `baseline` holds
    findings that are known; `write_baseline` writes it. `skip_others` leaves out named files that are no configuration,
    as a folder's are, for tools that hand over every file that was changed. Further options are those of `check`.

    >>> check_project("examples/llama-3-8b-64xH100.toml", select="BAT").exit_code
    0
    """
    from phalanx.rules.baseline import read_baseline, without_known
    from phalanx.rules.baseline import write_baseline as write_known
    from phalanx.rules.foreign.detect import TrainsNothingError
    from phalanx.rules.project import can_judge, find_config, find_files, read_config, recipe_targets

    tell = teller(progress)
    given = (rules,) if isinstance(rules, str) else tuple(rules)
    reports: list[CheckReport] = []
    failures: list[PhalanxError] = []
    looked_at, searched = 0, False
    configs: list[ProjectConfig] = []
    own_rules: dict[Path | None, Sequence[RuleSource]] = {}
    for target in targets or (".",):
        path = Path(target)
        folder = path if is_folder(path) else path.parent
        project = read_config(Path(config)) if config is not None else find_config(folder)
        configs.append(project)
        if project.file not in own_rules:  # told once, also where many files are named
            own_rules[project.file] = _project_rules(project, given, allow_code=allow_code, tell=tell)
        own = own_rules[project.file]
        files: Sequence[Path] = (path,) if not (skip_others and is_file(path)) or can_judge(path) else ()
        if _is_project_folder(path):
            found = find_files(path, project)
            files, looked_at, searched = found.files, looked_at + found.looked_at, True
            if found.left_off:
                tell(f"{path}: more than {found.looked_at - 1:,} files: the rest is not looked at")
        for file in files:
            base, parts = recipe_targets(file, override_texts(overrides))
            chosen = _file_options(base, project, cluster, override_texts(overrides), select, ignore, source)
            if chosen is None:
                continue
            for part in parts:
                try:
                    reports.append(check(part, rules=own, allow_code=allow_code, progress=tell, **chosen, **options))
                except TrainsNothingError as error:
                    if part == str(path) and not skip_others:  # named by the caller; among many it is passed over
                        failures.append(error)
                        tell(str(error))
                except PhalanxError as error:
                    failures.append(error)
                    tell(str(error))
    if searched and not reports and not failures:
        what = f"holds no file that can be judged, of {looked_at:,} looked at"
        raise mistake(str(targets[0] if targets else "."), what, fix="name a job file or a configuration by its path")
    name = _baseline_path(baseline, configs, write=write_baseline)
    if write_baseline and name is not None:
        tell(f"{name}: {plural(write_known(name, reports), 'known finding')}")
    elif name is not None:
        known = read_baseline(name)
        reports = [without_known(one, known, baseline=name) for one in reports]
    return ProjectReport(
        reports=tuple(reports),
        failures=tuple(failures),
        looked_at=looked_at,
        searched=searched,
        written=str(name) if write_baseline else "",
    )


def _is_project_folder(path: Path) -> bool:
    """Whether a target is a folder of files to look for, and not a run."""
    from phalanx.record.run_files import has_events

    if not is_folder(path):
        return False
    names = {one.name for one in path.iterdir()}
    return not ("plan.json" in names or "status.json" in names or has_events(names))


def _project_rules(
    project: ProjectConfig, given: tuple[RuleSource, ...], *, allow_code: bool, tell: Tell
) -> tuple[RuleSource, ...]:
    """The rules of a project file are somebody's code: they need the same consent as those of a job file."""
    if not project.rules:
        return given
    if not allow_code:
        tell(f"{project.file}: {plural(len(project.rules), 'rule')} of its own not asked: give --allow-code")
        return given
    named = [one if ".py" not in one else str(project.folder / one) for one in project.rules]
    return (*given, *named)


def _file_options(
    file: Path,
    project: ProjectConfig,
    cluster: str | None,
    overrides: Sequence[str],
    select: str,
    ignore: str,
    source: str,
) -> dict[str, Any] | None:
    """The options of one file: the call's, then the project's; None for one that is to be skipped."""
    from phalanx.rules.foreign.detect import trainer_of_file
    from phalanx.rules.gather import is_plan

    planned = not is_file(file) or is_plan(file)
    try:
        foreign = bool(source) or (not planned and bool(trainer_of_file(file)))
    except PhalanxError:
        foreign = False
    held = project.settings_for(file, foreign=foreign)
    if held.skip:
        return None
    ignored = ",".join(one for one in (ignore, *held.ignore) if one)
    found: dict[str, Any] = {"select": select or ",".join(held.select), "ignore": ignored, "source": source}
    if planned:  # settled: neither cluster nor overrides may change it
        return {**found, "cluster": cluster, "overrides": tuple(overrides)}
    return {
        **found,
        "source": source or held.source,
        "cluster": cluster or held.cluster or None,
        "overrides": (*held.overrides, *overrides),
    }


def _baseline_path(given: str | Path | None, configs: Sequence[ProjectConfig], *, write: bool) -> Path | None:
    if given is not None:
        return Path(given)
    named = next((one for one in configs if one.baseline), None)
    if named is not None:
        path = named.folder / named.baseline
        return path if write or is_file(path) else None
    return Path(BASELINE_NAME) if write else None
