"""Effects of commands on the state of a script: simple commands, started programs, functions, and their output."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.io.files import read_head
from phalanx.rules.foreign.shell.conditions import UNDECIDED, ConditionVerdict
from phalanx.rules.foreign.shell.expansion import expand_fields, expand_text
from phalanx.rules.foreign.shell.outputs import printed_output
from phalanx.rules.foreign.shell.own_commands import DONE, OWN, Outcome, declare_variables
from phalanx.rules.foreign.shell.partial_text import OPEN, is_known
from phalanx.rules.foreign.shell.python_text import NAMED_FILE, files_it_may_write, follow_python, program_text
from phalanx.rules.foreign.shell.scanner import ShellSyntaxError
from phalanx.rules.foreign.shell.script_state import StartedCommand, merge_states
from phalanx.rules.foreign.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Assignment,
    Block,
    CommandGroup,
    IfClause,
    Node,
    Pipeline,
    SimpleCommand,
    TestClause,
    Word,
)

if TYPE_CHECKING:
    from phalanx.rules.foreign.shell.interpreter import Interpreter

Condition = Callable[[], ConditionVerdict]
MOST_SOURCED = 1 << 18
SHELLS = ("bash", "sh", "zsh", "dash")
PYTHONS = ("python", "python3")
OUTPUT_FLAG = re.compile(r"-o|--(out|output|save|dest|destination|write|to)([-_]?(file|path|json|config))?")
PREFIXES = ("exec", "nohup", "command", "builtin", "time", "sudo", "stdbuf", "setsid")
# Commands that neither launch training nor affect a launch.
QUIET = frozenset(
    [
        "mkdir",
        "rm",
        "cp",
        "mv",
        "ls",
        "cd",
        "pushd",
        "popd",
        "chmod",
        "touch",
        "sleep",
        "wait",
        "kill",
        "trap",
        "ulimit",
        "umask",
        "module",
        "conda",
        "pip",
        "git",
        "date",
        "hostname",
        "nvidia-smi",
        "ln",
        "which",
        "type",
        "hash",
        "true",
        "ps",
        "grep",
        "awk",
        "df",
        "free",
        "wget",
        "curl",
        "tar",
        "unzip",
        "apt",
        "apt-get",
        "enable_lizard",
        "scontrol",
        "shopt",
        "alias",
        "complete",
        "source",
        "pwd",
        "jobs",
        "disown",
        "logger",
        "clear",
        "tput",
        "find",
        "xargs",
        "sort",
        "uniq",
        "head",
        "tail",
        "wc",
    ]
)


def run_simple(shell: Interpreter, node: SimpleCommand) -> Outcome:
    """Carry out one command: assignments, expansion, and its effect."""
    argv: list[str] = []
    declared: list[Assignment | str] = []
    for word in node.words:
        if isinstance(word, Assignment):
            declared.append(word)
        else:
            fields = expand_fields(word.text, shell)
            argv += fields
            declared += fields
    # A prefix such as $LAUNCHER that nothing sets is dropped
    while argv and shell.unknowns.is_unset(argv[0]):
        argv = argv[1:]
    if not argv:
        for assignment in node.assignments:
            shell.assign(assignment)
        if node.redirects and (text := shell.input_text(node.redirects)) is not None:
            _redirect(shell, node, text)
        substituted = any(
            assignment.value is not None and "$(" in assignment.value.text for assignment in node.assignments
        )
        return (UNDECIDED if substituted else ConditionVerdict(True)), None
    name = argv[0]
    if name in ("export", "declare", "typeset", "local", "readonly"):
        return declare_variables(shell, name, declared[1:])
    environment = {
        assignment.name: expand_text(assignment.value.text, shell)
        for assignment in node.assignments
        if assignment.value is not None
    }
    if name in shell.state.functions:
        return call_function(shell, argv)
    if name in OWN:
        return OWN[name](shell, argv, node)
    return start_command(shell, argv, node, environment)


def start_command(shell: Interpreter, argv: list[str], node: SimpleCommand, environment: dict[str, str]) -> Outcome:
    """Follow a program that only prints; record every other one as started."""
    name = argv[0].rpartition("/")[2]
    while name in PREFIXES and len(argv) > 1:
        argv = argv[1:]
        name = argv[0].rpartition("/")[2]
        if name in shell.state.functions:
            return call_function(shell, argv)
    if name == "env":
        argv = argv[1:]
        while argv and re.match(r"[A-Za-z_]\w*=", argv[0]):
            key, _, value = argv[0].partition("=")
            environment[key] = value
            argv = argv[1:]
        if not argv:
            return UNDECIDED, None
        name = argv[0].rpartition("/")[2]
    if name in SHELLS and (outcome := _inner_script(shell, argv[1:])) is not None:
        return outcome
    input_text = shell.input_text(node.redirects)
    if name in PYTHONS and (program := program_text(argv[1:], input_text)) is not None:
        _follow_program(shell, program, node)
        return UNDECIDED, None
    text = printed_output(argv, input_text, shell.read_file)
    if name == "sed" and "-i" in argv:
        target = argv[-1]
        shell.write_file(target, shell.open_mark(f"{target} as sed changes it") if text is None else text, append=False)
        return DONE
    if text is not None:
        if name == "tee":
            for target in argv[1:]:
                shell.write_file(target, text, append="-a" in argv)
        _redirect(shell, node, text)
        return DONE
    if any(redirect.operator in (">", ">|", "&>", ">>") for redirect in node.redirects) and name in (
        "python",
        "python3",
        "jq",
        "envsubst",
        "awk",
    ):
        _redirect(shell, node, shell.open_mark(f"what {name} prints"))
    if name in ("cp", "mv") and len(argv) == 3:
        _copy_file(shell, argv[1], argv[2])
    elif name in PYTHONS:
        _heed_outputs(shell, argv)
    if name in QUIET or not name:
        return UNDECIDED, None
    _note_start(shell, argv, environment)
    return UNDECIDED, None


def _follow_program(shell: Interpreter, program: str, node: SimpleCommand) -> None:
    """Follow an inline Python program: take over what it prints and writes, or mark its files as unknown."""
    effects = follow_python(program, shell.read_file)
    if effects is None:
        for name in files_it_may_write(program):
            shell.write_file(
                name, shell.open_mark(f"{name} as the Python program in line {shell.line} writes it"), append=False
            )
        if node.redirects:
            _redirect(shell, node, shell.open_mark(f"what the Python program in line {shell.line} prints"))
        return
    for name, text in effects.written.items():
        shell.write_file(name, text, append=False)
    _redirect(shell, node, effects.printed)


def _copy_file(shell: Interpreter, source: str, target: str) -> None:
    """Copy a file written by the script, as in `mv made.json ds.json`; other files do not matter here."""
    if source in shell.state.files and is_known(target):
        name = target if not target.endswith("/") else target + source.rpartition("/")[2]
        shell.write_file(name, shell.state.files[source], append=False)


def _heed_outputs(shell: Interpreter, argv: list[str]) -> None:
    """Mark files that a Python program may write, as in `python make_config.py --out ds.json`, as unknown."""
    for flag, name in itertools.pairwise(argv):
        if OUTPUT_FLAG.fullmatch(flag) and NAMED_FILE.fullmatch(name):
            shell.write_file(name, shell.open_mark(f"{name} as {argv[1][:60]} writes it"), append=False)


def _note_start(shell: Interpreter, argv: list[str], environment: dict[str, str]) -> None:
    exported = {key: value for key in sorted(shell.state.exported) if isinstance(value := shell.get_variable(key), str)}
    option_index = next(
        (index for index, argument in enumerate(argv) if argument in ("-c", "-lc", "-ic", "-xc") and index), 0
    )
    shell_name = argv[option_index - 1].rpartition("/")[2] if option_index else ""
    if option_index and option_index + 1 < len(argv) and shell_name in SHELLS:
        # srun … bash -c "…": the inner command line counts, and the outer one gives the number of hosts.
        _run_inner(shell, argv[option_index + 1], prefix=tuple(argv[: option_index - 1]))
        return
    if " " in argv[-1].strip() and argv[0].rpartition("/")[2] in (
        "ssh",
        "pdsh",
        "clush",
        "docker",
        "kubectl",
        "tmux",
        "su",
    ):
        _run_inner(shell, argv[-1], prefix=tuple(argv[:-1]))
        return
    shell.started.append(
        StartedCommand(
            argv=tuple(argv),
            line=shell.line,
            environment=exported | environment,
            files=dict(shell.state.files),
            doubtful=shell.doubt > 0,
        )
    )


def _run_inner(shell: Interpreter, text: str, *, prefix: tuple[str, ...] = ()) -> None:
    """Follow a string of commands in its own process, which sees only exported variables."""
    if shell.calls > 24:
        return
    outer_state = shell.state
    shell.state = outer_state.copy()
    shell.state.variables = {
        key: value for key, value in outer_state.variables.items() if key in outer_state.exported or key in shell.given
    }
    shell.calls += 1
    count, line = len(shell.started), shell.line
    try:
        shell.run_text(text, first_line=shell.line)
    except ShellSyntaxError:
        shell.started.append(
            StartedCommand(
                argv=(*prefix, shell.open_mark("commands that are not understood")),
                line=line,
                environment={},
                files={},
                doubtful=True,
            )
        )
    finally:
        shell.calls -= 1
        outer_state.files = shell.state.files
        shell.state = outer_state
    for index in range(count, len(shell.started)):
        inner_command = shell.started[index]
        shell.started[index] = StartedCommand(
            argv=(*prefix, *inner_command.argv),
            line=line,
            environment=inner_command.environment,
            files=inner_command.files,
            doubtful=inner_command.doubtful,
        )


def _inner_script(shell: Interpreter, rest: list[str]) -> Outcome | None:
    """Follow `bash -c text` and `bash file arguments`; None if the command is neither."""
    while rest and re.fullmatch(r"-[exulv]+|--login|--norc", rest[0]):
        rest = rest[1:]
    if len(rest) > 1 and re.fullmatch(r"-[exlui]*c", rest[0]):
        _run_inner(shell, rest[1])
        return UNDECIDED, None
    if not rest or rest[0].startswith("-"):
        return None
    path = shell.local_path(rest[0])
    text = shell.read_file(rest[0]) if path is not None or rest[0] in shell.state.files else None
    if text is None or shell.calls > 8:
        return None
    outer_state, arguments = shell.state, tuple(rest[1:])
    shell.state = outer_state.copy()
    shell.state.variables = {
        name: value
        for name, value in outer_state.variables.items()
        if name in outer_state.exported or name in shell.given
    }
    shell.state.functions, shell.state.positional, shell.state.shifted = {}, arguments, 0
    shell.calls += 1
    try:
        shell.run_text(text)
    except ShellSyntaxError:
        pass
    finally:
        shell.calls -= 1
        shell.state = outer_state
    return UNDECIDED, None


def _redirect(shell: Interpreter, node: SimpleCommand, text: str) -> None:
    for redirect in node.redirects:
        if redirect.operator in (">", ">>", ">|", "&>", "&>>"):
            shell.write_file(expand_text(redirect.target.text, shell), text, append=">>" in redirect.operator)


def read_small(path: Path) -> str | None:
    """Return a text file, or None if it is too large."""
    data = read_head(path, MOST_SOURCED + 1)
    if len(data) > MOST_SOURCED:
        return None
    return data.decode("utf-8", errors="replace").replace(OPEN, "?").replace("\r\n", "\n")


def call_function(shell: Interpreter, argv: list[str]) -> Outcome:
    """Follow a function of the script, with its own arguments and local variables."""
    shell.calls += 1
    if shell.calls > 24:
        shell.calls -= 1
        return UNDECIDED, None
    body = shell.state.functions[argv[0]]
    outer, outer_shift = shell.state.positional, shell.state.shifted
    outer_variables = dict(shell.state.variables)
    shell.state.positional, shell.state.shifted = tuple(argv[1:]), 0
    # A name that no script can use: it collects the names that the function declares local.
    shell.state.variables["\x00local"] = ()
    shell.returned.append([])
    signal = shell.run_block(body)
    for state in shell.returned.pop():
        shell.state = merge_states(
            shell.state, state, shell.unknowns, why=f"where {argv[0]} returns", line=shell.line, file=shell.file
        )
    names = shell.state.variables.pop("\x00local", ())
    for name in names if isinstance(names, tuple) else ():
        if name in outer_variables:
            shell.state.variables[name] = outer_variables[name]
        else:
            shell.state.variables.pop(name, None)
    if "\x00local" in outer_variables:
        shell.state.variables["\x00local"] = outer_variables["\x00local"]
    shell.state.positional, shell.state.shifted = outer, outer_shift
    shell.calls -= 1
    return UNDECIDED, "exit" if signal == "exit" else None


def function_printed(shell: Interpreter, argv: list[str]) -> str | None:
    """Return what a function of one command prints; None if it is not known."""
    body = shell.state.functions[argv[0]]
    inner = body[0].body if len(body) == 1 and isinstance(body[0], CommandGroup) else body
    if len(inner) != 1:
        return None
    outer = shell.state.positional
    shell.state.positional = tuple(argv[1:])
    try:
        return shell.pipe_text((inner[0],))
    finally:
        shell.state.positional = outer


def choice_printed(shell: Interpreter, node: AndOr) -> str | None:
    """Return what `[ test ] && echo one || echo two` prints; None if the test is undecided."""
    if (folder := _folder_printed(shell, node)) is not None:
        return folder
    if not (isinstance(node.first, TestClause | ArithmeticCommand) or _is_test(node.first)):
        return None
    verdict, _ = shell.run_node(node.first)
    if verdict.holds is None or verdict.ground == "no arguments":
        return None
    holds, text = verdict.holds, ""
    for operator, command in node.rest:
        if holds is (operator == "&&"):
            printed_text = shell.pipe_text((command,))
            if printed_text is None:
                return None
            text += printed_text
            holds = True
    return text


def clause_printed(shell: Interpreter, node: IfClause) -> str | None:
    """Return what `if test; then echo one; else echo two; fi` prints; None if a test is undecided."""
    for condition, body in node.branches:
        verdict = UNDECIDED
        for command in condition:
            verdict, _ = shell.run_node(command)
        if verdict.holds is None or verdict.ground == "no arguments":
            return None
        if verdict.holds:
            return _block_printed(shell, body)
    return _block_printed(shell, node.otherwise)


def _block_printed(shell: Interpreter, block: Block) -> str | None:
    texts = [shell.pipe_text(node.parts if isinstance(node, Pipeline) else (node,)) for node in block]
    return None if any(text is None for text in texts) else "".join(text or "" for text in texts)


def _is_test(node: Node) -> bool:
    first = node.words[0] if isinstance(node, SimpleCommand) and node.words else None
    return isinstance(first, Word) and first.text in ("[", "test")


def _folder_printed(shell: Interpreter, node: AndOr) -> str | None:
    """Return the folder that `cd folder && pwd` prints; None for other commands."""
    if len(node.rest) != 1 or not isinstance(node.first, SimpleCommand):
        return None
    last = node.rest[0][1]
    first = [field for word in node.first.words if isinstance(word, Word) for field in expand_fields(word.text, shell)]
    is_pwd = isinstance(last, SimpleCommand) and [word.text for word in last.words if isinstance(word, Word)] in (
        ["pwd"],
        ["pwd", "-P"],
    )
    names = [field for field in first[1:] if field not in ("--", "-P")]
    if not is_pwd or not first or first[0] != "cd" or len(names) != 1:
        return None
    return names[0] + "\n"
