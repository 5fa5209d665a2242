"""Follows a script from its first line to its last, through every way it may take. Nothing is run, nothing written."""

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
TEXT_STEPS = 100  # that a sourced file or a string of commands counts for: it is looked up and parsed each time
MOST_ROUNDS = 300  # of one loop
MOST_CALLS = 24  # functions, sourced files and strings of commands within each other
MOST_COMMANDS = 2_000

Signal = Literal["exit", "return", "break", "continue"] | None


class TooLongError(Exception):
    """The script does more than a launch script does."""


class Interpreter:
    """One script. `given` are variables that hold whatever the script assigns to them."""

    def __init__(self, *, file: str, folder: Path | None, given: dict[str, str]) -> None:
        self.file, self.folder, self.given = file, folder, given
        self.state = ShellState(variables=dict(given))
        if any(name.isdigit() for name in given):
            last = max(int(name) for name in given if name.isdigit())
            self.state.positional = tuple(given.get(str(n), "") for n in range(1, last + 1))
        self.unknowns = UnknownTable()
        self.started: list[StartedCommand] = []
        self.unset_used: dict[str, int] = {}  # variables that nothing sets -> where one was used first
        self.open_sources: list[str] = []  # sourced files that are not here
        self.line, self.depth, self.steps, self.calls, self.doubt = 0, 0, 0, 0, 0
        self.returned: list[list[ShellState]] = []
        self.broken: list[list[ShellState]] = []

    # ---- what expansions ask for -----------------------------------------------------------------------------------

    def get_variable(self, name: str) -> Text | None:
        """The value of a variable; None where nothing set it."""
        return self.state.variables.get(name)

    def set_variable(self, name: str, value: Text) -> None:
        """Assign, unless the caller gave another value."""
        if name not in self.given:
            self.state.variables[name] = value

    def unset_mark(self, name: str) -> str:
        """The mark of a variable that nothing sets, or that a file which is not here may set."""
        if name.isdigit():
            name = str(int(name) + self.state.shifted)
        self.unset_used.setdefault(name, self.line)
        if self.open_sources and not name.isdigit():
            why = f"nothing here sets {name}; {self.open_sources[0]} may"
            return self.unknowns.mark(Unknown(kind="open", why=why, name=name, line=self.line, file=self.file))
        what = f"argument {name} of the script" if name.isdigit() else f"{name}, which nothing sets"
        return self.unknowns.mark(Unknown(kind="unset", why=what, name=name, file=self.file))

    def positional(self) -> tuple[str, ...] | None:
        """The arguments; None where nobody gave any."""
        return self.state.positional

    def has_shifted(self) -> bool:
        """Whether arguments that nobody gave were shifted away: whoever starts the script gives some."""
        return self.state.positional is None and self.state.shifted > 0

    def special(self, name: str) -> str:
        """`$#`, `$0` and their kin."""
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
        """A mark for what cannot be worked out."""
        return self.unknowns.mark(Unknown(kind="open", why=why, name=name, line=self.line, file=self.file))

    def substitute(self, text: str) -> str:
        """What a command would print, where it is harmless; else a mark."""
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
        before = self.state
        self.state = before.copy()
        self.calls += 1
        try:
            return self._printed_block(block)
        finally:
            self.state = before
            self.calls -= 1

    def _printed_block(self, block: Block) -> str | None:
        if not block:  # `# a comment between lines that go on`
            return ""
        if len(block) != 1:
            return None
        node = block[0]
        if isinstance(node, AndOr):  # $(cd folder && pwd), $([ test ] && echo text)
            return commands.choice_printed(self, node)
        if isinstance(node, IfClause):
            return commands.clause_printed(self, node)
        parts = node.parts if isinstance(node, Pipeline) else (node,)
        return self.pipe_text(parts)

    def pipe_text(self, parts: tuple[Node, ...]) -> str | None:
        """What the last of several commands prints; None where one of them is not understood."""
        text: str | None = None
        for part in parts:
            if not isinstance(part, SimpleCommand) or part.assignments:
                return None
            given = self.input_text(part.redirects)
            argv = [field for word in part.words if isinstance(word, Word) for field in expand_fields(word.text, self)]
            if argv and argv[0] in self.state.functions:
                text = commands.function_printed(self, argv)
            else:
                text = printed_output(argv, text if given is None else given, self.read_file)
            if text is None:
                return None
            if argv and argv[0] == "tee":
                for name in argv[1:]:
                    self.write_file(name, text, append=False)
        return text

    def input_text(self, redirects: tuple[Redirect, ...]) -> str | None:
        """What `<< EOF`, `<<< text` or `< file` gives."""
        for one in redirects:
            if one.body is not None:
                text = "".join(one.body)
                return text if one.literal else expand_quoted(text, self)
            if one.operator == "<<<":
                return expand_text(one.target.text, self) + "\n"
            if one.operator == "<":
                return self.read_file(expand_text(one.target.text, self))
        return None

    def read_file(self, name: str) -> str | None:
        """A file that the script wrote, or one that lies in its folder."""
        if name in self.state.files:
            return self.state.files[name]
        path = self.local_path(name)
        return None if path is None else commands.read_small(path)

    def local_path(self, name: str) -> Path | None:
        """The file of a name, where it lies within the folder or its repository; nothing outside is looked at."""
        if self.folder is None or not is_known(name):
            return None
        return find_named_file(self.folder, name, Path(), self.folder, Path(self.file).parent)

    def write_file(self, name: str, text: str, *, append: bool) -> None:
        """Remember what a file would hold."""
        before = self.state.files.get(name, "") if append else ""
        self.state.files[name] = (before + text)[: 4 * MOST_TEXT]

    # ---- statements ------------------------------------------------------------------------------------------------

    def run_text(self, text: str, *, first_line: int = 1) -> Signal:
        """Follow the commands of a text; raises ShellSyntaxError."""
        self.steps += TEXT_STEPS
        return self.run_block(parse_shell(text, first_line=first_line))

    def run_block(self, block: Block) -> Signal:
        """Follow statements until one of them leaves."""
        for node in block:
            _, signal = self.run_node(node)
            if signal is not None:
                return signal
        return None

    def run_node(self, node: Node) -> tuple[ConditionVerdict, Signal]:
        """(status of the command, whether it leaves the block)."""
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
        """`(( … ))`: true where it is not zero."""
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
            for one in last.redirects if isinstance(last, SimpleCommand) else ():
                if one.operator in (">", ">>", ">|", "&>"):
                    self.write_file(expand_text(one.target.text, self), text, append=one.operator == ">>")
            return ConditionVerdict(True), None
        for part in node.parts:  # each in a process of its own
            before = self.state
            self.state = before.copy()
            self.run_node(part)
            self.state, written = before, self.state.files
            self.state.files = written
        return UNDECIDED, None

    def _run_and_or(self, node: AndOr) -> tuple[ConditionVerdict, Signal]:
        verdict, signal = self.run_node(node.first)
        for operator, other in node.rest:
            if signal is not None:
                return verdict, signal
            if verdict.holds is None or verdict.ground == "no arguments":
                wanted = f"{'success' if operator == '&&' else 'failure'} of a command in line {self.line}"
                signal = self._either((other,), (), wanted)
                verdict = UNDECIDED
            elif verdict.holds is (operator == "&&"):
                before = self.state.copy()
                verdict_before = verdict
                verdict, signal = self.run_node(other)
                if signal in ("exit", "return") and verdict_before.ground != "sure":
                    self.state, signal = before, None
        return verdict, signal

    def _run_group(self, node: CommandGroup) -> tuple[ConditionVerdict, Signal]:
        given = self.input_text(node.redirects)
        text = None if given is not None else self._group_text(node)
        if text is not None:
            return ConditionVerdict(True), None
        before = self.state
        if node.subshell:
            self.state = before.copy()
        signal = self.run_block(node.body)
        if node.subshell:
            before.files = self.state.files
            self.state, signal = before, None
        return UNDECIDED, signal

    def _group_text(self, node: CommandGroup) -> str | None:
        """`{ echo …; echo …; } > file`."""
        target = next((one for one in node.redirects if one.operator in (">", ">>")), None)
        if target is None:
            return None
        texts = [self.pipe_text((part,)) for part in node.body]
        whole = None if any(text is None for text in texts) else "".join(text or "" for text in texts)
        if whole is not None:
            self.write_file(expand_text(target.target.text, self), whole, append=target.operator == ">>")
        return whole

    # ---- ways ------------------------------------------------------------------------------------------------------

    def _either(self, one: Block, two: Block, why: str) -> Signal:
        """Follow both ways, and go on with what they agree on."""
        line, before = self.line, self.state
        self.doubt += 1
        self.state = before.copy()
        first_signal = self.run_block(one)
        first, self.state = self.state, before
        second_signal = self.run_block(two)
        self.doubt -= 1
        self.line = line
        return self._join(first, first_signal, self.state, second_signal, why)

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
        (condition, body), rest = branches[0], branches[1:]
        verdict = self._condition(condition)
        self.line = line
        if verdict.holds is None or verdict.ground == "no arguments":
            return self._either_if(body, rest, otherwise, line)
        other = self.state.copy() if verdict.ground == "default" else None
        count = len(self.started)
        signal = self.run_block(body) if verdict.holds else self._run_if(rest, otherwise, line)
        if signal == "exit" and other is not None:  # it would stop for want of a value: go on as if it were there
            self.state = other
            del self.started[count:]
            return self._run_if(rest, otherwise, line) if verdict.holds else self.run_block(body)
        return signal

    def _either_if(self, body: Block, rest: tuple[tuple[Block, Block], ...], otherwise: Block, line: int) -> Signal:
        why = f"the condition in line {line}"
        before = self.state
        self.doubt += 1
        self.state = before.copy()
        first_signal = self.run_block(body)
        first, self.state = self.state, before
        second_signal = self._run_if(rest, otherwise, line)
        self.doubt -= 1
        self.line = line
        return self._join(first, first_signal, self.state, second_signal, why)

    def _run_arms(self, subject: str, arms: tuple[tuple[tuple[Word, ...], Block], ...], line: int) -> Signal:
        for index, (patterns, body) in enumerate(arms):
            hits = [matches_pattern(subject, expand_text(one.text, self)) for one in patterns]
            if True in hits:
                return self.run_block(body)
            if None not in hits:
                continue
            before = self.state
            self.doubt += 1
            self.state = before.copy()
            first_signal = self.run_block(body)
            first, self.state = self.state, before
            second_signal = self._run_arms(subject, arms[index + 1 :], line)
            self.doubt -= 1
            self.line = line
            return self._join(first, first_signal, self.state, second_signal, f"the case in line {line}")
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
        # Nobody knows how often: what the body changes is not known, and a second round shows what depends on it.
        names = set(self.state.variables)
        before = dict(self.state.variables)
        signal = self._either(body, (), f"the loop in line {line}")
        for name in names | set(self.state.variables):
            if self.state.variables.get(name) != before.get(name):
                self.set_variable(name, self.open_mark(f"the loop in line {line}", name))
        self._leave_loop(None, line)
        return signal if signal in ("exit", "return") else None

    def assign(self, one: Assignment) -> None:
        """`NAME=value` in all its forms."""
        assign_variable(self, one)
