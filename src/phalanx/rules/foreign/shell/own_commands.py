"""The shell's built-in commands: their effects on the state of a script."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.rules.foreign.shell.conditions import UNDECIDED, ConditionVerdict, TestReader
from phalanx.rules.foreign.shell.partial_text import is_known
from phalanx.rules.foreign.shell.scanner import ShellSyntaxError
from phalanx.rules.foreign.shell.syntax import Assignment, SimpleCommand

if TYPE_CHECKING:
    from phalanx.rules.foreign.shell.interpreter import Interpreter, Signal

Outcome = tuple[ConditionVerdict, "Signal"]
DONE: Outcome = ConditionVerdict(True), None
# Files that set up an environment and no training.
HARMLESS = re.compile(
    r"(activate|[\w.-]*env[\w.-]*|\.?bashrc|\.?profile|\.bash_profile|conda\.sh|modules?\.sh|init/\w+|setvars\.sh|\.zshrc|set_env\.sh|lmod)$"
)

# Programs whose output sets variables of the script; `eval "$(conda shell.bash hook)"` and similar set a tool's.
SETS = re.compile(r"\b(python3?|Python|jq|yq|awk|grep|cat|sed|envsubst)\b")


def declare_variables(shell: Interpreter, name: str, rest: list[Assignment | str]) -> Outcome:
    """Carry out `export`, `local`, `declare` and similar commands."""
    options = "".join(item for item in rest if isinstance(item, str) and item.startswith("-"))
    for item in rest:
        if isinstance(item, str) and item.startswith("-"):
            continue
        target = item.name if isinstance(item, Assignment) else item.partition("=")[0]
        # Such as export "$key=$value", export $(cat .env | xargs)
        if not is_known(target):
            why = shell.unknowns.first(target)
            if why is not None and why.kind == "open":
                open_variables(shell, why.why[:80])
            continue
        if "A" in options:
            shell.state.tables |= {target}
        is_in_function = "\x00local" in shell.state.variables
        if name == "local" or (is_in_function and name in ("declare", "typeset") and "g" not in options):
            names = shell.state.variables.get("\x00local", ())
            if isinstance(names, tuple):
                shell.state.variables["\x00local"] = (*names, target)
        if isinstance(item, Assignment):
            shell.assign(item)
        elif "=" in item:
            shell.set_variable(target, item.partition("=")[2])
        elif name == "local" and target not in shell.given:
            shell.state.variables[target] = ""
        if name == "export" or "x" in options:
            shell.state.exported |= {target}
    return DONE


def _unset(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    for name in argv[1:]:
        if name not in shell.given:
            shell.state.variables.pop(name, None)
    return DONE


def _set(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    if "--" in argv:
        shell.state.positional = tuple(argv[argv.index("--") + 1 :])
    return DONE


def _shift(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    count = int(argv[1]) if len(argv) > 1 and argv[1].isdigit() else 1
    if shell.state.positional is None:
        shell.state.shifted += count
    else:
        shell.state.positional = shell.state.positional[count:]
    return DONE


def open_variables(shell: Interpreter, cause: str) -> None:
    """Mark every variable as unknown, because unavailable commands may have set it."""
    for name in [*shell.state.variables]:
        if not name.startswith("\x00"):
            shell.set_variable(name, shell.open_mark(f"{name} as {cause} may set it", name))
    shell.open_sources.append(cause)


def _source(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    if len(argv) < 2:
        return UNDECIDED, None
    inner = re.fullmatch(r"<\((.*)\)", argv[1], re.DOTALL)
    text = shell.substitute(inner.group(1)) if inner else shell.read_file(argv[1])
    output_or_file = text if text is not None else argv[1]
    if (why := shell.unknowns.first(output_or_file)) is not None and why.kind == "open" and SETS.search(why.why):
        open_variables(shell, why.why[:80])
        return UNDECIDED, None
    if text is None or shell.calls > 8:
        file_name = shell.unknowns.shown(argv[1])
        if not HARMLESS.search(file_name):
            open_variables(shell, file_name[:80])
        return UNDECIDED, None
    shell.calls += 1
    outer_file, outer = shell.file, shell.state.positional
    if len(argv) > 2:
        shell.state.positional = tuple(argv[2:])
    try:
        signal = shell.run_text(text)
    except ShellSyntaxError:
        shell.open_sources.append(argv[1][:80])
        signal = None
    finally:
        shell.calls -= 1
        shell.file = outer_file
        if len(argv) > 2:
            shell.state.positional = outer
    return UNDECIDED, "exit" if signal == "exit" else None


def _eval(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    if shell.calls > 24:
        return UNDECIDED, None
    text = " ".join(argv[1:])
    if (why := shell.unknowns.alone(text.strip())) is not None and why.kind == "open" and SETS.search(why.why):
        open_variables(shell, why.why[:80])
        return UNDECIDED, None
    shell.calls += 1
    try:
        return UNDECIDED, shell.run_text(text, first_line=shell.line)
    except ShellSyntaxError:
        return UNDECIDED, None
    finally:
        shell.calls -= 1


def _test(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    words = argv[1:-1] if argv[0] == "[" and argv[-1] == "]" else argv[1:]
    return TestReader(words, shell, shell.state.files, double=False).verdict(), None


def _let(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    verdict = UNDECIDED
    for text in argv[1:]:
        verdict = shell.arithmetic_verdict(text)
    return verdict, None


def _read(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    input_text = shell.input_text(node.redirects)
    names = [argument for argument in argv[1:] if re.fullmatch(r"[A-Za-z_]\w*", argument)]
    if "-a" in argv or len(names) > 1:
        words = (input_text or "").split()
        if input_text is not None and "-a" in argv and names:
            shell.set_variable(names[-1], tuple(words))
            return DONE
        if input_text is not None and is_known(input_text):
            for place, name in enumerate(names):
                is_last = place == len(names) - 1
                shell.set_variable(name, " ".join(words[place:]) if is_last else "".join(words[place : place + 1]))
            return DONE
    for name in names:
        shell.set_variable(
            name, input_text.strip() if input_text is not None else shell.open_mark(f"what is read into {name}", name)
        )
    return (ConditionVerdict(True) if input_text is not None else UNDECIDED), None


def _signal(name: Signal) -> Callable[[Interpreter, list[str], SimpleCommand], Outcome]:
    return lambda shell, argv, node: (UNDECIDED, name)


def _status(holds: bool) -> Callable[[Interpreter, list[str], SimpleCommand], Outcome]:
    return lambda shell, argv, node: (ConditionVerdict(holds), None)


def _no_arguments(shell: Interpreter, argv: list[str], node: SimpleCommand) -> Outcome:
    return ConditionVerdict(False, "no arguments"), None


OWN: dict[str, Callable[[Interpreter, list[str], SimpleCommand], Outcome]] = {
    "unset": _unset,
    "set": _set,
    "shift": _shift,
    "source": _source,
    ".": _source,
    "eval": _eval,
    "[": _test,
    "test": _test,
    "let": _let,
    "read": _read,
    "exit": _signal("exit"),
    "return": _signal("return"),
    "break": _signal("break"),
    "continue": _signal("continue"),
    ":": _status(True),
    "true": _status(True),
    "false": _status(False),
    "getopts": _no_arguments,
}
