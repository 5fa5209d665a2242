"""What the ranks of a run talked through, and whether compiled code agreed with eager code, from rank 0's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.io.values import integer, number, printable, text
from phalanx.record.events import Event
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory

MOST_SHOWN = 40  # settings, groups, memberships


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMade:
    """The process groups of one axis of the mesh, and the seconds rank 0 took to make them."""

    group: str
    ranks: int
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipGroups:
    """The process groups of one membership."""

    generation: int
    seconds: float
    groups: tuple[GroupMade, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCheck:
    """Compiled code against eager code on one micro-batch; `passed` is None where nothing could be said."""

    step: int
    seconds: float
    compile_s: float
    passed: bool | None
    reason: str
    gradient_difference: float | None
    bound: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Of a run: every membership's groups, and library and settings as the newest had them."""

    backend: str
    mode: str
    formations: tuple[MembershipGroups, ...]
    version: str
    built_version: str
    libraries: tuple[str, ...]
    preloaded: tuple[str, ...]
    variables: Mapping[str, str]
    differences: tuple[str, ...]
    notes: tuple[str, ...]
    checks: tuple[CompileCheck, ...] = ()


def read_communication(history: RunHistory) -> Communication | None:
    """What rank 0 wrote; None for a run of before."""
    made = [event for event in history.events("communicators") if isinstance(event.get("groups"), list)]
    checks = tuple(_compile_check(event) for event in history.events("compile_check"))
    if not made and not checks:
        return None
    reported = next((event for event in reversed(made) if "variables" in event), {})
    return Communication(
        backend=text(made[-1], "backend") if made else "",
        mode=text(made[-1], "mode") if made else "",
        formations=tuple(_membership_groups(event) for event in made),
        version=text(reported, "version"),
        built_version=text(reported, "built_version"),
        libraries=_text_tuple(reported.get("libraries")),
        preloaded=_text_tuple(reported.get("preloaded")),
        variables=_variable_texts(reported.get("variables")),
        differences=_text_tuple(reported.get("differences")),
        notes=_text_tuple(reported.get("notes")),
        checks=checks,
    )


def communication_lines(found: Communication) -> list[str]:
    """For a terminal."""
    if not found.backend:
        return check_lines(found)
    library = f"NCCL {found.version}" if found.version else found.backend
    if found.version and found.built_version and found.version != found.built_version:
        library += f" (torch was compiled against {found.built_version})"
    how = {"eager": "connect when created (eager)", "lazy": "connect at the first collective (lazy)"}
    lines = [f"{library}; process groups {how.get(found.mode, found.mode)}"]
    lines += [f"library  {one}" for one in found.libraries[:MOST_SHOWN]]
    lines += [f"preloaded  {one}" for one in found.preloaded[:MOST_SHOWN]]
    for one in found.formations[-3:]:
        lines.append(f"generation {one.generation}: process groups made in {format_seconds(one.seconds)}")
        lines += [
            f"  {group.group}: {plural(group.count, 'group')} of {plural(group.ranks, 'rank')}, "
            f"{format_seconds(group.seconds)}"
            for group in one.groups[:MOST_SHOWN]
        ]
    if len(found.formations) > 3:
        lines.append(f"the last 3 of {len(found.formations):,} memberships")
    lines += [f"{name} = {value}" for name, value in list(found.variables.items())[:MOST_SHOWN]]
    if not found.variables:
        lines.append("no NCCL_* or TORCH_NCCL_* variable is set")
    lines += [f"differs: {one}" for one in found.differences]
    lines += [f"note: {one}" for one in found.notes]
    return [*lines, *check_lines(found)]


def check_lines(found: Communication) -> list[str]:
    """What comparing compiled code with eager code found, and what it cost."""
    lines = []
    for one in found.checks[-3:]:
        said = {True: "agrees", False: "does NOT agree", None: "could not be compared"}[one.passed]
        why = f" ({one.reason})" if one.reason else ""
        if one.gradient_difference is not None and one.bound is not None and one.passed is not None:
            why = f": gradients differ by {one.gradient_difference:.1e}, rounding explains {one.bound:.1e}"
        cost = f"{format_seconds(one.seconds)}, {format_seconds(one.compile_s)} of it compiling"
        lines.append(f"step {one.step:,}: compiled code {said} with eager code{why}; took {cost}")
    return lines


def _membership_groups(event: Event) -> MembershipGroups:
    groups = [one for one in event["groups"] if isinstance(one, dict)]
    return MembershipGroups(
        generation=integer(event, "epoch") or 0,
        seconds=number(event, "seconds") or 0.0,
        groups=tuple(
            GroupMade(
                group=text(one, "group"),
                ranks=integer(one, "ranks") or 1,
                count=integer(one, "count") or 1,
                seconds=number(one, "seconds") or 0.0,
            )
            for one in groups
        ),
    )


def _compile_check(event: Event) -> CompileCheck:
    passed = event.get("passed")
    return CompileCheck(
        step=integer(event, "step") or 0,
        seconds=number(event, "seconds") or 0.0,
        compile_s=number(event, "compile_s") or 0.0,
        passed=passed if isinstance(passed, bool) else None,
        reason=text(event, "reason"),
        gradient_difference=number(event, "gradient_difference"),
        bound=number(event, "bound"),
    )


def _text_tuple(given: Any) -> tuple[str, ...]:
    one_by_one: Sequence[Any] = given if isinstance(given, list) else ()
    return tuple(printable(one, most=500) for one in one_by_one if isinstance(one, str))


def _variable_texts(given: Any) -> dict[str, str]:
    return (
        {printable(name, most=100): printable(value) for name, value in given.items()}
        if isinstance(given, dict)
        else {}
    )
