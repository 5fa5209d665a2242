"""State of a script at one point: variables, functions, files it wrote; and the commands that it would start."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.rules.foreign.shell.partial_text import Text, UnknownTable, merged_values
from phalanx.rules.foreign.shell.syntax import Block


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedCommand:
    """A command line that the script would start; `doubtful` if only one of two branches does."""

    argv: tuple[str, ...]
    line: int
    environment: dict[str, str]
    files: dict[str, str]
    doubtful: bool = False


@dataclass(kw_only=True, slots=True)
class ShellState:
    """The state on one path through the script."""

    variables: dict[str, Text] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()
    functions: dict[str, Block] = field(default_factory=dict)
    positional: tuple[str, ...] | None = None  # None: those of the script, which were not given
    shifted: int = 0
    files: dict[str, str] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()  # names declared with -A

    def copy(self) -> ShellState:
        """Return an independent copy for another path."""
        return ShellState(
            variables=dict(self.variables),
            exported=self.exported,
            functions=dict(self.functions),
            positional=self.positional,
            shifted=self.shifted,
            files=dict(self.files),
            tables=self.tables,
        )


def merge_states(
    one: ShellState, two: ShellState, unknowns: UnknownTable, *, why: str, line: int, file: str
) -> ShellState:
    """Return the state after either branch: values that agree, and marks for those that do not."""
    if one is two:
        return one
    variables: dict[str, Text] = {}
    for name in {**one.variables, **two.variables}:
        first_value, second_value = one.variables.get(name), two.variables.get(name)
        is_same = first_value == second_value and first_value is not None
        variables[name] = (
            first_value
            if is_same and first_value is not None
            else merged_values(first_value, second_value, unknowns, why=why, line=line, file=file)
        )
    files: dict[str, str] = {}
    for name in {**one.files, **two.files}:
        if one.files.get(name) == two.files.get(name):
            files[name] = one.files[name]
        else:
            text = merged_values(one.files.get(name), two.files.get(name), unknowns, why=why, line=line, file=file)
            files[name] = text if isinstance(text, str) else ""
    return ShellState(
        variables=variables,
        exported=one.exported | two.exported,
        functions={**one.functions, **two.functions},
        positional=one.positional if one.positional == two.positional else None,
        shifted=max(one.shifted, two.shifted),
        files=files,
        tables=one.tables | two.tables,
    )
