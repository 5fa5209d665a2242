"""Parser of shell text to a syntax tree: the grammar of bash, as far as launch scripts use it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from phalanx.rules.foreign.shell.scanner import BREAKS, ShellSyntaxError, end_of_word
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

MOST_DEPTH = 40  # nesting of clauses
OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "&>>", "&>", "|", "&", ";", "(", ")")
_REDIRECT = re.compile(r"(?:\d{1,2}|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>&|>\||<|>)|&>>|&>")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+)?=")
_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
_DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})
_END_WORDS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}", "in"})


# A script that starts another in a loop parses it again each time
@lru_cache(maxsize=128)
def parse_shell(text: str, *, first_line: int = 1) -> Block:
    """Return the statements of a text; raise ShellSyntaxError with the line."""
    block, error = parse_statements(text, first_line=first_line)
    if error is not None:
        raise error
    return block


def parse_statements(text: str, *, first_line: int = 1) -> tuple[Block, ShellSyntaxError | None]:
    """Return the statements before the first invalid one, and the error of that one.

    A shell reads and runs one statement after the other: statements before an error have run when it is found.
    """
    parser = _Parser(text, first_line)
    nodes: list[Node] = []
    try:
        while True:
            parser.skip_separators()
            if parser.at >= len(text):
                return tuple(nodes), None
            if parser.peek_operator() not in ("", "("):
                parser.fail(f"{parser.peek_operator()!r} where a command was expected")
            nodes.append(parser.read_and_or())
            parser.skip_blanks()
            if parser.peek_operator() in (";", "&"):
                parser.at += 1
    except ShellSyntaxError as error:
        return tuple(nodes), error


class _Parser:
    def __init__(self, text: str, first_line: int) -> None:
        self.text = text
        self.at = 0
        self.first_line = first_line
        self.depth = 0
        self.here: list[
            tuple[str, bool, list[str]]
        ] = []  # end word, whether tabs are removed, where the body is stored
        self._line_seen, self._line = 0, first_line

    # ---- characters ------------------------------------------------------------------------------------------------

    @property
    def line(self) -> int:
        if self.at >= self._line_seen:
            self._line += self.text.count("\n", self._line_seen, self.at)
            self._line_seen = self.at
            return self._line
        return self.first_line + self.text.count("\n", 0, self.at)

    def fail(self, what: str) -> None:
        raise ShellSyntaxError(what, self.line)

    def skip_blanks(self, *, newlines: bool = False) -> None:
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char in " \t\r":
                self.at += 1
            elif char == "\\" and text[self.at + 1 : self.at + 2] == "\n":
                self.at += 2
            elif char == "\\" and text[self.at + 1 : self.at + 3] == "\r\n":
                self.at += 3
            elif char == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif char == "\n" and newlines:
                self.take_newline()
            else:
                return

    def skip_separators(self) -> None:
        """Skip blanks, newlines and semicolons before a statement."""
        self.skip_blanks(newlines=True)
        while self.peek_operator() == ";":
            self.at += 1
            self.skip_blanks(newlines=True)

    def take_newline(self) -> None:
        self.at += 1
        for end_word, tabs, body in self.here:
            lines = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(len(self.text), end + 1)
                line = line.lstrip("\t") if tabs else line
                if line.rstrip("\r") == end_word:
                    break
                lines.append(line + "\n")
            body.append("".join(lines))
        self.here = []

    def peek_operator(self) -> str:
        for operator in OPERATORS:
            if self.text.startswith(operator, self.at):
                return operator
        return ""

    def peek_word(self) -> str:
        """Return the plain word that begins here without reading it; empty if it is quoted or an operator."""
        end = self.at
        while end < len(self.text) and self.text[end] not in BREAKS and self.text[end] not in "'\"$`\\":
            end += 1
        is_plain = end >= len(self.text) or self.text[end] in BREAKS
        return self.text[self.at : end] if is_plain else ""

    def take_word(self) -> Word:
        line = self.line
        try:
            end = end_of_word(self.text, self.at)
        except ShellSyntaxError as error:
            raise ShellSyntaxError(error.what, self.first_line + error.line - 1) from error
        if end == self.at:
            self.fail(f"{self.text[self.at : self.at + 1]!r} where a word was expected")
        word = Word(self.text[self.at : end], line)
        self.at = end
        return word

    def expect(self, keyword: str) -> None:
        self.skip_blanks(newlines=True)
        if self.peek_word() != keyword:
            self.fail(f"{keyword!r} is missing")
        self.at += len(keyword)

    # ---- lists -----------------------------------------------------------------------------------------------------

    def read_block(self, ends: frozenset[str]) -> Block:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            self.fail(f"nests deeper than {MOST_DEPTH} clauses")
        nodes: list[Node] = []
        while True:
            self.skip_separators()
            if self.at >= len(self.text) or self.peek_operator() in (")", ";;", ";&", ";;&"):
                break
            if self.peek_word() in ends:
                break
            nodes.append(self.read_and_or())
            self.skip_blanks()
            if self.peek_operator() in (";", "&"):
                self.at += 1
        self.depth -= 1
        return tuple(nodes)

    def read_and_or(self) -> Node:
        first = self.read_pipeline()
        rest: list[tuple[str, Node]] = []
        while True:
            self.skip_blanks()
            operator = self.peek_operator()
            if operator not in ("&&", "||"):
                return AndOr(first=first, rest=tuple(rest)) if rest else first
            self.at += 2
            self.skip_blanks(newlines=True)
            rest.append((operator, self.read_pipeline()))

    def read_pipeline(self) -> Node:
        negated = False
        while self.peek_word() in ("!", "time"):
            negated ^= self.peek_word() == "!"
            self.at += len(self.peek_word())
            self.skip_blanks()
        parts = [self.read_command()]
        while True:
            self.skip_blanks()
            operator = self.peek_operator()
            if operator not in ("|", "|&"):
                break
            self.at += len(operator)
            self.skip_blanks(newlines=True)
            parts.append(self.read_command())
        return Pipeline(parts=tuple(parts), negated=negated) if negated or len(parts) > 1 else parts[0]

    # ---- commands --------------------------------------------------------------------------------------------------

    def read_command(self) -> Node:
        line = self.line
        if self.text.startswith("((", self.at) and (arithmetic_end := self._arithmetic_end()) is not None:
            text = self.text[self.at + 2 : arithmetic_end]
            self.at = arithmetic_end + 2
            return ArithmeticCommand(line=line, text=text)
        if self.peek_operator() == "(":
            self.at += 1
            body = self.read_block(frozenset())
            self.expect_close()
            return CommandGroup(body=body, subshell=True, redirects=self.read_redirects())
        word = self.peek_word()
        clauses: dict[str, Callable[[], Node]] = {
            "if": self.read_if,
            "for": self.read_for,
            "select": self.read_for,
            "while": self.read_while,
            "until": self.read_while,
            "case": self.read_case,
            "function": self.read_function,
            "[[": self.read_test,
        }
        if word in clauses:
            node = clauses[word]()
            redirects = self.read_redirects()
            return CommandGroup(body=(node,), redirects=redirects) if redirects else node
        if word == "{":
            return self.read_group()
        if word in _END_WORDS:
            self.fail(f"{word!r} where a command was expected")
        name = _NAME.match(self.text, self.at)
        if name and re.compile(r"[ \t]*\([ \t]*\)").match(self.text, name.end()):
            return self.read_function()
        return self.read_simple()

    def expect_close(self) -> None:
        self.skip_blanks(newlines=True)
        if self.peek_operator() != ")":
            self.fail("')' is missing")
        self.at += 1

    def _arithmetic_end(self) -> int | None:
        depth, at = 0, self.at
        while at < len(self.text):
            if self.text[at] == "(":
                depth += 1
            elif self.text[at] == ")":
                depth -= 1
                if depth == 0:
                    return at - 1 if self.text[at - 1] == ")" else None
            at += 1
        return None

    def read_group(self) -> Node:
        self.at += 1
        body = self.read_block(frozenset({"}"}))
        self.expect("}")
        return CommandGroup(body=body, redirects=self.read_redirects())

    def read_function(self) -> Node:
        if self.peek_word() == "function":
            self.at += len("function")
            self.skip_blanks()
        name = _NAME.match(self.text, self.at)
        if name is None:
            self.fail("a function without a name")
            raise AssertionError
        self.at = name.end()
        self.skip_blanks()
        if self.peek_operator() == "(":
            self.at += 1
            self.expect_close()
        self.skip_blanks(newlines=True)
        body = self.read_command()
        return FunctionDefinition(name=name.group(), body=(body,))

    def read_if(self) -> Node:
        line = self.line
        branches: list[tuple[Block, Block]] = []
        otherwise: Block = ()
        word = "if"
        while word in ("if", "elif"):
            self.at += len(word)
            condition = self.read_block(frozenset({"then"}))
            self.expect("then")
            branches.append((condition, self.read_block(frozenset({"elif", "else", "fi"}))))
            word = self.peek_word()
        if word == "else":
            self.at += len("else")
            otherwise = self.read_block(frozenset({"fi"}))
        self.expect("fi")
        return IfClause(line=line, branches=tuple(branches), otherwise=otherwise)

    def read_body(self) -> Block:
        self.skip_blanks()
        if self.peek_operator() == ";":
            self.at += 1
        self.skip_blanks(newlines=True)
        if self.peek_word() == "{":
            group = self.read_group()
            assert isinstance(group, CommandGroup)
            return group.body
        self.expect("do")
        body = self.read_block(frozenset({"done"}))
        self.expect("done")
        return body

    def read_for(self) -> Node:
        line = self.line
        self.at += len(self.peek_word())
        self.skip_blanks()
        if self.text.startswith("((", self.at) and (end := self._arithmetic_end()) is not None:
            parts = [*self.text[self.at + 2 : end].split(";"), "", ""][:3]
            self.at = end + 2
            return CountingLoop(line=line, start=parts[0], condition=parts[1], step=parts[2], body=self.read_body())
        name = self.take_word().text
        self.skip_blanks(newlines=True)
        words: list[Word] | None = None
        if self.peek_word() == "in":
            self.at += 2
            words = []
            self.skip_blanks()
            while self.at < len(self.text) and self.text[self.at] not in ";\n":
                words.append(self.take_word())
                self.skip_blanks()
        return ForLoop(line=line, name=name, words=None if words is None else tuple(words), body=self.read_body())

    def read_while(self) -> Node:
        line, until = self.line, self.peek_word() == "until"
        self.at += len(self.peek_word())
        condition = self.read_block(frozenset({"do"}))
        return WhileLoop(line=line, condition=condition, body=self.read_body(), until=until)

    def read_case(self) -> Node:
        line = self.line
        self.at += len("case")
        self.skip_blanks()
        subject = self.take_word()
        self.expect("in")
        arms: list[tuple[tuple[Word, ...], Block]] = []
        while True:
            self.skip_blanks(newlines=True)
            if self.peek_word() == "esac" or self.at >= len(self.text):
                break
            if self.peek_operator() == "(":
                self.at += 1
                self.skip_blanks()
            patterns = [self.take_word()]
            self.skip_blanks()
            while self.peek_operator() == "|":
                self.at += 1
                self.skip_blanks()
                patterns.append(self.take_word())
                self.skip_blanks()
            self.expect_close()
            arms.append((tuple(patterns), self.read_block(frozenset({"esac"}))))
            operator = self.peek_operator()
            if operator in (";;", ";&", ";;&"):
                self.at += len(operator)
        self.expect("esac")
        return CaseClause(line=line, subject=subject, arms=tuple(arms))

    def read_test(self) -> Node:
        line = self.line
        self.at += 2
        words: list[Word] = []
        while True:
            self.skip_blanks(newlines=True)
            if self.at >= len(self.text):
                self.fail("']]' is missing")
            if self.peek_word() == "]]":
                self.at += 2
                return TestClause(line=line, words=tuple(words))
            operator = self.peek_operator() or (self.text[self.at] if self.text[self.at] in "<>" else "")
            if words and words[-1].text == "=~":
                words.append(self._pattern_word())
            elif operator:
                words.append(Word(operator, self.line))
                self.at += len(operator)
            else:
                words.append(self.take_word())

    def _pattern_word(self) -> Word:
        """Read a regular expression, to which parentheses and bars belong."""
        line, end = self.line, end_of_word(self.text, self.at, breaks=frozenset(" \t\n"))
        word = Word(self.text[self.at : end], line)
        self.at = end
        return word

    def read_redirects(self) -> tuple[Redirect, ...]:
        redirects: list[Redirect] = []
        while True:
            self.skip_blanks()
            if (redirect := self.read_redirect()) is None:
                return tuple(redirects)
            redirects.append(redirect)

    def read_redirect(self) -> Redirect | None:
        match = _REDIRECT.match(self.text, self.at)
        if match is None or (match.group().lstrip("0123456789") in ("<", ">") and self.text[match.end() :][:1] == "("):
            return None
        operator = match.group(1) or match.group()
        if match.group()[0].isdigit() and match.group()[0] != "1":
            # Not written to stdout
            operator = "2" + operator if not operator.startswith("<") else operator
        self.at = match.end()
        self.skip_blanks()
        target = self.take_word()
        if operator not in ("<<", "<<-"):
            return Redirect(operator=operator, target=target)
        end_word = re.sub(r"['\"\\]", "", target.text)
        body: list[str] = []
        self.here.append((end_word, operator == "<<-", body))
        return Redirect(operator="<<", target=target, body=body, literal=end_word != target.text)

    def read_simple(self) -> Node:
        line = self.line
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        redirects: list[Redirect] = []
        while True:
            self.skip_blanks()
            if self.at >= len(self.text) or self.text[self.at] == "\n":
                break
            if (redirect := self.read_redirect()) is not None:
                redirects.append(redirect)
                continue
            if self.peek_operator() in OPERATORS:
                break
            first = words[0] if words else None
            declares = isinstance(first, Word) and first.text in _DECLARING
            if (not words or declares) and (assignment := self.read_assignment()) is not None:
                words.append(assignment) if declares else assignments.append(assignment)
            else:
                words.append(self.take_word())
        if not assignments and not words and not redirects:
            self.fail(f"{self.text[self.at : self.at + 1]!r} where a command was expected")
        command = SimpleCommand(
            line=line, assignments=tuple(assignments), words=tuple(words), redirects=tuple(redirects)
        )
        return command

    def read_assignment(self) -> Assignment | None:
        match = _ASSIGN.match(self.text, self.at)
        if match is None:
            return None
        line = self.line
        name, index, append = match.group(1), match.group(2), bool(match.group(3))
        self.at = match.end()
        if self.text[self.at : self.at + 1] != "(":
            has_value = self.at < len(self.text) and self.text[self.at] not in BREAKS
            value = self.take_word() if has_value else Word("", line)
            return Assignment(name=name, line=line, index=index[1:-1] if index else None, append=append, value=value)
        self.at += 1
        items: list[Word] = []
        while True:
            self.skip_blanks(newlines=True)
            if self.at >= len(self.text):
                self.fail("parenthesis ( that is never closed")
            if self.text[self.at] == ")":
                self.at += 1
                return Assignment(name=name, line=line, append=append, items=tuple(items))
            # No shell accepts it, but an argument list in a text file may contain it
            if self.text[self.at] in ";&|":
                self.at += 1
                continue
            items.append(self.take_word())
