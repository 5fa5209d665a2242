"""Check many files: a folder of configurations with its `.phalanx.toml`, and a baseline of known findings."""

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
    """The reports of several files; `failures` are the errors of files that could not be read."""

    reports: tuple[CheckReport, ...]
    failures: tuple[PhalanxError, ...] = ()
    looked_at: int = 0  # files in the searched folders
    searched: bool = False  # True if a folder was given
    written: str = ""  # the baseline that was written

    @property
    def known(self) -> int:
        """Number of findings that are in the baseline."""
        from phalanx.rules.baseline import KNOWN

        return sum(finding.reason == KNOWN for report in self.reports for finding in report.findings)

    @property
    def exit_code(self) -> int:
        """The exit code of the worst file; 0 if a baseline was written."""
        codes = [error.exit_code for error in self.failures]
        return max([0, *codes, *(0 if self.written else report.exit_code for report in self.reports)])

    def __str__(self) -> str:
        from phalanx.rules.formats.text import render_text

        pages = render_text([report for report in self.reports if report.problems or not self.searched])
        return "\n".join(page for page in (pages.rstrip("\n"), *self.table_lines()) if page)

    def table_lines(self) -> list[str]:
        """Return a row per file, if a folder was searched."""
        if not self.searched:
            return []
        from phalanx.rules.formats.text import counts_of

        rows = [("file", "errors", "warnings", "known", "unknown", "")]
        for report in self.reports:
            warnings = sum(finding.severity == "warning" for finding in report.problems)
            waived = sum(finding.verdict == "waived" for finding in report.findings)
            counts = (report.errors, warnings, waived, counts_of(report)["unknown"])
            errors, warned, waived_text, unknown = (str(count) for count in counts)
            rows.append((report.target, errors, warned, waived_text, unknown, "ok" if report.is_clean else "FAIL"))
        for error in self.failures:
            rows.append((error.problems[0].where, "", "", "", "", "cannot be read"))
        failing = sum(not report.is_clean for report in self.reports)
        last = (
            f"{plural(len(self.reports), 'file')} judged of {self.looked_at:,} looked at: {failing} with findings, "
            f"{len(self.failures)} that cannot be read; {plural(self.known, 'known finding')}"
        )
        return ["", *text_table(rows, right=(1, 2, 3, 4)), last]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "reports": [report.to_dict() for report in self.reports],
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

    `config` is a project file; by default the nearest `.phalanx.toml` above each target. Arguments take precedence
    over it. The rules that a project file names are run only with `allow_code`. `baseline` holds known findings;
    `write_baseline` writes it. `skip_others` skips named files that are not configurations, as is done for those in a
    folder; it is meant for tools that pass every changed file. Further options are those of `check`.

    >>> check_project("examples/llama-3-8b-64xH100.toml", select="BAT").exit_code
    0
    """
    from phalanx.rules.baseline import read_baseline, without_known
    from phalanx.rules.baseline import write_baseline as write_known
    from phalanx.rules.foreign.detect import TrainsNothingError
    from phalanx.rules.project import can_judge, find_config, find_files, read_config, recipe_targets

    tell = teller(progress)
    given_rules = (rules,) if isinstance(rules, str) else tuple(rules)
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
        if project.file not in own_rules:  # printed once, also if many files are named
            own_rules[project.file] = _project_rules(project, given_rules, allow_code=allow_code, tell=tell)
        own = own_rules[project.file]
        files: Sequence[Path] = (path,) if not (skip_others and is_file(path)) or can_judge(path) else ()
        if _is_project_folder(path):
            search = find_files(path, project)
            files, looked_at, searched = search.files, looked_at + search.looked_at, True
            if search.left_off:
                tell(f"{path}: more than {search.looked_at - 1:,} files: the rest is not looked at")
        for file in files:
            base, parts = recipe_targets(file, override_texts(overrides))
            chosen = _file_options(base, project, cluster, override_texts(overrides), select, ignore, source)
            if chosen is None:
                continue
            for recipe in parts:
                try:
                    reports.append(check(recipe, rules=own, allow_code=allow_code, progress=tell, **chosen, **options))
                except TrainsNothingError as error:
                    # Named by the caller; in a folder it is skipped.
                    if recipe == str(path) and not skip_others:
                        failures.append(error)
                        tell(str(error))
                except PhalanxError as error:
                    failures.append(error)
                    tell(str(error))
    if searched and not reports and not failures:
        message = f"holds no file that can be judged, of {looked_at:,} looked at"
        raise mistake(
            str(targets[0] if targets else "."), message, fix="name a job file or a configuration by its path"
        )
    name = _baseline_path(baseline, configs, write=write_baseline)
    if write_baseline and name is not None:
        tell(f"{name}: {plural(write_known(name, reports), 'known finding')}")
    elif name is not None:
        known_findings = read_baseline(name)
        reports = [without_known(report, known_findings, baseline=name) for report in reports]
    return ProjectReport(
        reports=tuple(reports),
        failures=tuple(failures),
        looked_at=looked_at,
        searched=searched,
        written=str(name) if write_baseline else "",
    )


def _is_project_folder(path: Path) -> bool:
    """Return True if a target is a folder to search, and not a run."""
    from phalanx.record.run_files import has_events

    if not is_folder(path):
        return False
    names = {entry.name for entry in path.iterdir()}
    return not ("plan.json" in names or "status.json" in names or has_events(names))


def _project_rules(
    project: ProjectConfig, given: tuple[RuleSource, ...], *, allow_code: bool, tell: Tell
) -> tuple[RuleSource, ...]:
    """Return the rules to apply; those of a project file are code and need the same consent as those of a job file."""
    if not project.rules:
        return given
    if not allow_code:
        tell(f"{project.file}: {plural(len(project.rules), 'rule')} of its own not asked: give --allow-code")
        return given
    rule_files = [
        rule_name if ".py" not in rule_name else str(project.folder / rule_name) for rule_name in project.rules
    ]
    return (*given, *rule_files)


def _file_options(
    file: Path,
    project: ProjectConfig,
    cluster: str | None,
    overrides: Sequence[str],
    select: str,
    ignore: str,
    source: str,
) -> dict[str, Any] | None:
    """Return the options of one file, the call's before the project's; None if the file is to be skipped."""
    from phalanx.rules.foreign.detect import trainer_of_file
    from phalanx.rules.gather import is_plan

    is_planned = not is_file(file) or is_plan(file)
    try:
        foreign = bool(source) or (not is_planned and bool(trainer_of_file(file)))
    except PhalanxError:
        foreign = False
    file_settings = project.settings_for(file, foreign=foreign)
    if file_settings.skip:
        return None
    ignored = ",".join(rule_list for rule_list in (ignore, *file_settings.ignore) if rule_list)
    options: dict[str, Any] = {"select": select or ",".join(file_settings.select), "ignore": ignored, "source": source}
    # A plan is final: neither cluster nor overrides may change it.
    if is_planned:
        return {**options, "cluster": cluster, "overrides": tuple(overrides)}
    return {
        **options,
        "source": source or file_settings.source,
        "cluster": cluster or file_settings.cluster or None,
        "overrides": (*file_settings.overrides, *overrides),
    }


def _baseline_path(given: str | Path | None, configs: Sequence[ProjectConfig], *, write: bool) -> Path | None:
    if given is not None:
        return Path(given)
    config_with_baseline = next((project_config for project_config in configs if project_config.baseline), None)
    if config_with_baseline is not None:
        path = config_with_baseline.folder / config_with_baseline.baseline
        return path if write or is_file(path) else None
    return Path(BASELINE_NAME) if write else None
