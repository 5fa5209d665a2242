"""The process groups and communication library of a run, and its checks of compiled code, from rank 0's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.io.values import integer, number, printable, text
from phalanx.record.events import Event
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory

MOST_SHOWN = 40  # settings, libraries or groups that are printed


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMade:
    """The process groups of one axis of the mesh, and the seconds rank 0 took to create them."""

    group: str
    ranks: int
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipGroups:
    """The process groups of one membership, and the seconds rank 0 took to create them all."""

    generation: int
    seconds: float
    groups: tuple[GroupMade, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCheck:
    """A comparison of compiled with eager code on one micro-batch; `passed` is None if they could not be compared."""

    step: int
    seconds: float
    compile_s: float
    passed: bool | None
    reason: str
    gradient_difference: float | None
    bound: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """The process groups of every membership of a run, with the library and settings of the newest."""

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
    """Read what rank 0 recorded about communication; None for a run of a version that recorded nothing."""
    group_events = [event for event in history.events("communicators") if isinstance(event.get("groups"), list)]
    checks = tuple(_compile_check(event) for event in history.events("compile_check"))
    if not group_events and not checks:
        return None
    newest_settings = next((event for event in reversed(group_events) if "variables" in event), {})
    return Communication(
        backend=text(group_events[-1], "backend") if group_events else "",
        mode=text(group_events[-1], "mode") if group_events else "",
        formations=tuple(_membership_groups(event) for event in group_events),
        version=text(newest_settings, "version"),
        built_version=text(newest_settings, "built_version"),
        libraries=_text_tuple(newest_settings.get("libraries")),
        preloaded=_text_tuple(newest_settings.get("preloaded")),
        variables=_variable_texts(newest_settings.get("variables")),
        differences=_text_tuple(newest_settings.get("differences")),
        notes=_text_tuple(newest_settings.get("notes")),
        checks=checks,
    )


def communication_lines(found: Communication) -> list[str]:
    """Format the communication of a run as lines for a terminal."""
    if not found.backend:
        return check_lines(found)
    library = f"NCCL {found.version}" if found.version else found.backend
    if found.version and found.built_version and found.version != found.built_version:
        library += f" (torch was compiled against {found.built_version})"
    mode_texts = {"eager": "connect when created (eager)", "lazy": "connect at the first collective (lazy)"}
    lines = [f"{library}; process groups {mode_texts.get(found.mode, found.mode)}"]
    lines += [f"library  {library_path}" for library_path in found.libraries[:MOST_SHOWN]]
    lines += [f"preloaded  {library_path}" for library_path in found.preloaded[:MOST_SHOWN]]
    for membership in found.formations[-3:]:
        lines.append(f"generation {membership.generation}: process groups made in {format_seconds(membership.seconds)}")
        lines += [
            f"  {group.group}: {plural(group.count, 'group')} of {plural(group.ranks, 'rank')}, "
            f"{format_seconds(group.seconds)}"
            for group in membership.groups[:MOST_SHOWN]
        ]
    if len(found.formations) > 3:
        lines.append(f"the last 3 of {len(found.formations):,} memberships")
    lines += [f"{name} = {value}" for name, value in list(found.variables.items())[:MOST_SHOWN]]
    if not found.variables:
        lines.append("no NCCL_* or TORCH_NCCL_* variable is set")
    lines += [f"differs: {difference}" for difference in found.differences]
    lines += [f"note: {note}" for note in found.notes]
    return [*lines, *check_lines(found)]


def check_lines(found: Communication) -> list[str]:
    """Format the newest three compile checks: result, reason and cost."""
    lines = []
    for check in found.checks[-3:]:
        result = {True: "agrees", False: "does NOT agree", None: "could not be compared"}[check.passed]
        reason = f" ({check.reason})" if check.reason else ""
        if check.gradient_difference is not None and check.bound is not None and check.passed is not None:
            reason = f": gradients differ by {check.gradient_difference:.1e}, rounding explains {check.bound:.1e}"
        cost = f"{format_seconds(check.seconds)}, {format_seconds(check.compile_s)} of it compiling"
        lines.append(f"step {check.step:,}: compiled code {result} with eager code{reason}; took {cost}")
    return lines


def _membership_groups(event: Event) -> MembershipGroups:
    groups = [group for group in event["groups"] if isinstance(group, dict)]
    return MembershipGroups(
        generation=integer(event, "epoch") or 0,
        seconds=number(event, "seconds") or 0.0,
        groups=tuple(
            GroupMade(
                group=text(group, "group"),
                ranks=integer(group, "ranks") or 1,
                count=integer(group, "count") or 1,
                seconds=number(group, "seconds") or 0.0,
            )
            for group in groups
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
    items: Sequence[Any] = given if isinstance(given, list) else ()
    return tuple(printable(item, most=500) for item in items if isinstance(item, str))


def _variable_texts(given: Any) -> dict[str, str]:
    return (
        {printable(name, most=100): printable(value) for name, value in given.items()}
        if isinstance(given, dict)
        else {}
    )
