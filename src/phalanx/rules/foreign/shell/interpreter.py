"""Interpreter that follows a script along every path it may take. It runs no program and writes no file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from phalanx.rules.foreign.named_files import find_named_file
from phalanx.rules.foreign.shell import commands
from phalanx.rules.foreign.shell.arithmetic import UnknownNumberError
from phalanx.rules.foreign.shell.assignment import assign_variable
from phalanx.rules.foreign.shell.conditions import UNDECIDED, ConditionVerdict, TestReader, negated_verdict
from phalanx.rules.foreign.shell.expansion import evaluate_in, expand_fields, expand_quoted, expand_text
from phalanx.rules.foreign.shell.outputs import printed_output
from phalanx.rules.foreign.shell.partial_text import MOST_TEXT, Text, Unknown, UnknownTable, is_known
from phalanx.rules.foreign.shell.patterns import matches_pattern
from phalanx.rules.foreign.shell.scanner import ShellSyntaxError
from phalanx.rules.foreign.shell.script_parser import parse_shell
from phalanx.rules.foreign.shell.script_state import ShellState, StartedCommand, merge_states
from phalanx.rules.foreign.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Assignment,
    Block,
    CaseClause,
    CommandGroup,
    CountingLoop,
    ForLoop,
    FunctionDefinition,
    IfClause,
    Node,
    Pipeline,
    Redirect,
    SimpleCommand,
    TestClause,
    WhileLoop,
    Word,
)

MOST_STEPS = 40_000  # statements; the longest launch script seen takes 900
# Cost in steps of a sourced file or a string of commands, which is looked up and parsed each time
TEXT_STEPS = 100
MOST_ROUNDS = 300  # iterations of one loop
MOST_CALLS = 24  # nesting of functions, sourced files and strings of commands
MOST_COMMANDS = 2_000

Signal = Literal["exit", "return", "break", "continue"] | None


class TooLongError(Exception):
    """The script takes more steps than a launch script."""


class Interpreter:
    """Interpreter of one script. `given` are variables that keep their value whatever the script assigns to them."""

    def __init__(self, *, file: str, folder: Path | None, given: dict[str, str]) -> None:
        self.file, self.folder, self.given = file, folder, given
        self.state = ShellState(variables=dict(given))
        if any(name.isdigit() for name in given):
            last = max(int(name) for name in given if name.isdigit())
            self.state.positional = tuple(given.get(str(number), "") for number in range(1, last + 1))
        self.unknowns = UnknownTable()
        self.started: list[StartedCommand] = []
        # Variables that nothing sets -> the line where one was used first
        self.unset_used: dict[str, int] = {}
        # Sourced files that are not available
        self.open_sources: list[str] = []
        self.line, self.depth, self.steps, self.calls, self.doubt = 0, 0, 0, 0, 0
        self.returned: list[list[ShellState]] = []
        self.broken: list[list[ShellState]] = []

    # ---- interface for expansions -----------------------------------------------------------------------------------

    def get_variable(self, name: str) -> Text | None:
        """Return the value of a variable; None if nothing set it."""
        return self.state.variables.get(name)

    def set_variable(self, name: str, value: Text) -> None:
        """Assign a variable, unless the caller gave another value."""
        if name not in self.given:
            self.state.variables[name] = value

    def unset_mark(self, name: str) -> str:
        """Return the mark of a variable that nothing sets, or that an unavailable file may set."""
        if name.isdigit():
            name = str(int(name) + self.state.shifted)
        self.unset_used.setdefault(name, self.line)
        if self.open_sources and not name.isdigit():
            reason = f"nothing here sets {name}; {self.open_sources[0]} may"
            return self.unknowns.mark(Unknown(kind="open", why=reason, name=name, line=self.line, file=self.file))
        description = f"argument {name} of the script" if name.isdigit() else f"{name}, which nothing sets"
        return self.unknowns.mark(Unknown(kind="unset", why=description, name=name, file=self.file))

    def positional(self) -> tuple[str, ...] | None:
        """Return the arguments of the script or function; None if none were given."""
        return self.state.positional

    def has_shifted(self) -> bool:
        """Return whether arguments that were not given were shifted: the caller of the script then gives some."""
        return self.state.positional is None and self.state.shifted > 0

    def special(self, name: str) -> str:
        """Return the value of `$#`, `$0` and similar variables, or a mark."""
        if name == "0":
            return self.file
        if name == "#":
            if self.state.positional is not None:
                return str(len(self.state.positional))
            return self.unknowns.mark(
                Unknown(kind="unset", why="how many arguments the script gets", name="#", file=self.file)
            )
        return self.open_mark(f"${name}")

    def open_mark(self, why: str, name: str = "") -> str:
        """Return a mark for a value that cannot be determined."""
        return self.unknowns.mark(Unknown(kind="open", why=why, name=name, line=self.line, file=self.file))

    def substitute(self, text: str) -> str:
        """Return what a harmless command would print; a mark for any other command."""
        output = self._printed_by(text)
        return self.open_mark(f"$({' '.join(text.split())[:60]}) is not run") if output is None else output.rstrip("\n")

    def _printed_by(self, text: str) -> str | None:
        if self.calls > MOST_CALLS:
            return None
        if text.strip().startswith("<"):
            return self.read_file(expand_text(text.strip()[1:].strip(), self))
        try:
            block = parse_shell(text, first_line=self.line)
        except ShellSyntaxError:
            return None
        outer_state = self.state
        self.state = outer_state.copy()
        self.calls += 1
        try:
            return self._printed_block(block)
        finally:
            self.state = outer_state
            self.calls -= 1

    def _printed_block(self, block: Block) -> str | None:
        # Such as a comment between continued lines
        if not block:
            return ""
        if len(block) != 1:
            return None
        node = block[0]
        if isinstance(node, AndOr):  # $(cd folder && pwd), $([ test ] && echo text)
            return commands.choice_printed(self, node)
        if isinstance(node, IfClause):
            return commands.clause_printed(self, node)
        commands_of_pipe = node.parts if isinstance(node, Pipeline) else (node,)
        return self.pipe_text(commands_of_pipe)

    def pipe_text(self, parts: tuple[Node, ...]) -> str | None:
        """Return what the last of several commands prints; None if one of them is not understood."""
        text: str | None = None
        for command in parts:
            if not isinstance(command, SimpleCommand) or command.assignments:
                return None
            input_text = self.input_text(command.redirects)
            argv = [
                field for word in command.words if isinstance(word, Word) for field in expand_fields(word.text, self)
            ]
            if argv and argv[0] in self.state.functions:
                text = commands.function_printed(self, argv)
            else:
                text = printed_output(argv, text if input_text is None else input_text, self.read_file)
            if text is None:
                return None
            if argv and argv[0] == "tee":
                for name in argv[1:]:
                    self.write_file(name, text, append=False)
        return text

    def input_text(self, redirects: tuple[Redirect, ...]) -> str | None:
        """Return the input that `<< EOF`, `<<< text` or `< file` gives."""
        for redirect in redirects:
            if redirect.body is not None:
                text = "".join(redirect.body)
                return text if redirect.literal else expand_quoted(text, self)
            if redirect.operator == "<<<":
                return expand_text(redirect.target.text, self) + "\n"
            if redirect.operator == "<":
                return self.read_file(expand_text(redirect.target.text, self))
        return None

    def read_file(self, name: str) -> str | None:
        """Return a file that the script wrote, or one in its folder; None if it is not available."""
        if name in self.state.files:
            return self.state.files[name]
        path = self.local_path(name)
        return None if path is None else commands.read_small(path)

    def local_path(self, name: str) -> Path | None:
        """Return a file within the folder or its repository; files outside are not accessed."""
        if self.folder is None or not is_known(name):
            return None
        return find_named_file(self.folder, name, Path(), self.folder, Path(self.file).parent)

    def write_file(self, name: str, text: str, *, append: bool) -> None:
        """Record the content that a file would have."""
        old_text = self.state.files.get(name, "") if append else ""
        self.state.files[name] = (old_text + text)[: 4 * MOST_TEXT]

    # ---- statements ------------------------------------------------------------------------------------------------

    def run_text(self, text: str, *, first_line: int = 1) -> Signal:
        """Follow the commands of a text; raise ShellSyntaxError."""
        self.steps += TEXT_STEPS
        return self.run_block(parse_shell(text, first_line=first_line))

    def run_block(self, block: Block) -> Signal:
        """Follow statements until one of them leaves the block."""
        for node in block:
            _, signal = self.run_node(node)
            if signal is not None:
                return signal
        return None

    def run_node(self, node: Node) -> tuple[ConditionVerdict, Signal]:
        """Return (status of the command, signal that leaves the block)."""
        self.steps += 1
        if self.steps > MOST_STEPS or len(self.started) > MOST_COMMANDS:
            raise TooLongError
        match node:
            case SimpleCommand():
                self.line = node.line
                return commands.run_simple(self, node)
            case Pipeline():
                return self._run_pipeline(node)
            case AndOr():
                return self._run_and_or(node)
            case IfClause():
                return UNDECIDED, self._run_if(node.branches, node.otherwise, node.line)
            case ForLoop():
                return UNDECIDED, self._run_for(node)
            case CountingLoop():
                return UNDECIDED, self._run_counting(node)
            case WhileLoop():
                return UNDECIDED, self._run_while(node)
            case CaseClause():
                self.line = node.line
                return UNDECIDED, self._run_arms(expand_text(node.subject.text, self), node.arms, node.line)
            case FunctionDefinition():
                self.state.functions[node.name] = node.body
                return ConditionVerdict(True), None
            case CommandGroup():
                return self._run_group(node)
            case TestClause():
                self.line = node.line
                words = [word.text for word in node.words]
                return TestReader(words, self, self.state.files, double=True).verdict(), None
            case ArithmeticCommand():
                self.line = node.line
                return self.arithmetic_verdict(node.text), None

    def arithmetic_verdict(self, text: str) -> ConditionVerdict:
        """Return the verdict of `(( … ))`: true if the value is not zero."""
        filled = expand_text(text.replace('"', ""), self)
        count = self.unknowns.first(filled)
        if count is not None and count.name == "#" and count.kind == "unset":
            return ConditionVerdict(False, "no arguments")
        try:
            return ConditionVerdict(evaluate_in(filled, self) != 0)
        except UnknownNumberError:
            return UNDECIDED

    def _run_pipeline(self, node: Pipeline) -> tuple[ConditionVerdict, Signal]:
        if len(node.parts) == 1:
            verdict, signal = self.run_node(node.parts[0])
            return negated_verdict(verdict), signal
        last = node.parts[-1]
        text = self.pipe_text(node.parts)
        if text is not None:
            for redirect in last.redirects if isinstance(last, SimpleCommand) else ():
                if redirect.operator in (">", ">>", ">|", "&>"):
                    self.write_file(expand_text(redirect.target.text, self), text, append=redirect.operator == ">>")
            return ConditionVerdict(True), None
        for command in node.parts:  # each in its own process
            outer_state = self.state
            self.state = outer_state.copy()
            self.run_node(command)
            self.state, files = outer_state, self.state.files
            self.state.files = files
        return UNDECIDED, None

    def _run_and_or(self, node: AndOr) -> tuple[ConditionVerdict, Signal]:
        verdict, signal = self.run_node(node.first)
        for operator, command in node.rest:
            if signal is not None:
                return verdict, signal
            if verdict.holds is None or verdict.ground == "no arguments":
                reason = f"{'success' if operator == '&&' else 'failure'} of a command in line {self.line}"
                signal = self._either((command,), (), reason)
                verdict = UNDECIDED
            elif verdict.holds is (operator == "&&"):
                state_before = self.state.copy()
                verdict_before = verdict
                verdict, signal = self.run_node(command)
                if signal in ("exit", "return") and verdict_before.ground != "sure":
                    self.state, signal = state_before, None
        return verdict, signal

    def _run_group(self, node: CommandGroup) -> tuple[ConditionVerdict, Signal]:
        input_text = self.input_text(node.redirects)
        text = None if input_text is not None else self._group_text(node)
        if text is not None:
            return ConditionVerdict(True), None
        outer_state = self.state
        if node.subshell:
            self.state = outer_state.copy()
        signal = self.run_block(node.body)
        if node.subshell:
            outer_state.files = self.state.files
            self.state, signal = outer_state, None
        return UNDECIDED, signal

    def _group_text(self, node: CommandGroup) -> str | None:
        """Follow `{ echo …; echo …; } > file`; return the text, or None if it is not known."""
        target = next((redirect for redirect in node.redirects if redirect.operator in (">", ">>")), None)
        if target is None:
            return None
        texts = [self.pipe_text((command,)) for command in node.body]
        text = None if any(text is None for text in texts) else "".join(text or "" for text in texts)
        if text is not None:
            self.write_file(expand_text(target.target.text, self), text, append=target.operator == ">>")
        return text

    # ---- branches ---------------------------------------------------------------------------------------------------

    def _either(self, one: Block, two: Block, why: str) -> Signal:
        """Follow both branches, and continue with the values on which they agree."""
        line, outer_state = self.line, self.state
        self.doubt += 1
        self.state = outer_state.copy()
        first_signal = self.run_block(one)
        first_state, self.state = self.state, outer_state
        second_signal = self.run_block(two)
        self.doubt -= 1
        self.line = line
        return self._join(first_state, first_signal, self.state, second_signal, why)

    def _join(self, first: ShellState, one: Signal, second: ShellState, two: Signal, why: str) -> Signal:
        for state, signal in ((first, one), (second, two)):
            if signal == "return" and self.returned:
                self.returned[-1].append(state)
            elif signal in ("break", "continue") and self.broken:
                self.broken[-1].append(state)
        if one is not None and two is not None:
            return one if one == two else "exit" if "exit" not in (one, two) else two if one == "exit" else one
        if one is not None or two is not None:
            self.state = second if one is not None else first
            return None
        self.state = merge_states(first, second, self.unknowns, why=why, line=self.line, file=self.file)
        return None

    def _condition(self, block: Block) -> ConditionVerdict:
        verdict = UNDECIDED
        for node in block:
            verdict, _ = self.run_node(node)
        return verdict

    def _run_if(self, branches: tuple[tuple[Block, Block], ...], otherwise: Block, line: int) -> Signal:
        self.line = line
        if not branches:
            return self.run_block(otherwise)
        (condition, body), further_branches = branches[0], branches[1:]
        verdict = self._condition(condition)
        self.line = line
        if verdict.holds is None or verdict.ground == "no arguments":
            return self._either_if(body, further_branches, otherwise, line)
        other_state = self.state.copy() if verdict.ground == "default" else None
        count = len(self.started)
        signal = self.run_block(body) if verdict.holds else self._run_if(further_branches, otherwise, line)
        # It would stop for lack of a value: continue as if there were one
        if signal == "exit" and other_state is not None:
            self.state = other_state
            del self.started[count:]
            return self._run_if(further_branches, otherwise, line) if verdict.holds else self.run_block(body)
        return signal

    def _either_if(self, body: Block, rest: tuple[tuple[Block, Block], ...], otherwise: Block, line: int) -> Signal:
        reason = f"the condition in line {line}"
        outer_state = self.state
        self.doubt += 1
        self.state = outer_state.copy()
        first_signal = self.run_block(body)
        first_state, self.state = self.state, outer_state
        second_signal = self._run_if(rest, otherwise, line)
        self.doubt -= 1
        self.line = line
        return self._join(first_state, first_signal, self.state, second_signal, reason)

    def _run_arms(self, subject: str, arms: tuple[tuple[tuple[Word, ...], Block], ...], line: int) -> Signal:
        for index, (patterns, body) in enumerate(arms):
            hits = [matches_pattern(subject, expand_text(pattern.text, self)) for pattern in patterns]
            if True in hits:
                return self.run_block(body)
            if None not in hits:
                continue
            outer_state = self.state
            self.doubt += 1
            self.state = outer_state.copy()
            first_signal = self.run_block(body)
            first_state, self.state = self.state, outer_state
            second_signal = self._run_arms(subject, arms[index + 1 :], line)
            self.doubt -= 1
            self.line = line
            return self._join(first_state, first_signal, self.state, second_signal, f"the case in line {line}")
        return None

    # ---- loops -----------------------------------------------------------------------------------------------------

    def _run_for(self, node: ForLoop) -> Signal:
        self.line = node.line
        if node.words is None:
            items = list(self.state.positional or ())
        else:
            items = [field for word in node.words for field in expand_fields(word.text, self)]
        unsure = [item for item in items if self.unknowns.alone(item) is not None]
        unsure = [item for item in unsure if not self.unknowns.is_unset(item)]
        if unsure or len(items) > MOST_ROUNDS:
            self.set_variable(node.name, unsure[0] if unsure else self.open_mark("a loop over many words"))
            return self._either(node.body, (), f"the loop in line {node.line}")
        self.broken.append([])
        signal: Signal = None
        for item in items:
            if self.unknowns.is_unset(item):
                continue
            self.set_variable(node.name, item)
            signal = self.run_block(node.body)
            if signal in ("break", "exit", "return"):
                break
        return self._leave_loop(signal, node.line)

    def _leave_loop(self, signal: Signal, line: int) -> Signal:
        for state in self.broken.pop():
            self.state = merge_states(
                self.state, state, self.unknowns, why=f"the loop in line {line}", line=line, file=self.file
            )
        return signal if signal in ("exit", "return") else None

    def _run_counting(self, node: CountingLoop) -> Signal:
        self.line = node.line
        self.arithmetic_verdict(node.start)
        return self._repeat(node.body, lambda: self.arithmetic_verdict(node.condition or "1"), node.line, node.step)

    def _run_while(self, node: WhileLoop) -> Signal:
        self.line = node.line

        def holds() -> ConditionVerdict:
            verdict = self._condition(node.condition)
            return negated_verdict(verdict) if node.until else verdict

        return self._repeat(node.body, holds, node.line, "")

    def _repeat(self, body: Block, holds: commands.Condition, line: int, step: str) -> Signal:
        self.broken.append([])
        for _ in range(MOST_ROUNDS):
            verdict = holds()
            if verdict.holds is False:
                return self._leave_loop(None, line)
            if verdict.holds is None:
                break
            signal = self.run_block(body)
            if signal in ("break", "exit", "return"):
                return self._leave_loop(signal, line)
            if step:
                self.arithmetic_verdict(step)
        # The number of iterations is not known: one more pass shows the variables that the body changes, which become
        # unknown.
        names = set(self.state.variables)
        old_variables = dict(self.state.variables)
        signal = self._either(body, (), f"the loop in line {line}")
        for name in names | set(self.state.variables):
            if self.state.variables.get(name) != old_variables.get(name):
                self.set_variable(name, self.open_mark(f"the loop in line {line}", name))
        self._leave_loop(None, line)
        return signal if signal in ("exit", "return") else None

    def assign(self, one: Assignment) -> None:
        """Carry out `NAME=value` in all its forms."""
        assign_variable(self, one)
