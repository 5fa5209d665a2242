"""Output of harmless commands such as echo, cat, sed, dirname and seq, computed without running them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from phalanx.rules.foreign.shell.arithmetic import UnknownNumberError, evaluate_arithmetic
from phalanx.rules.foreign.shell.partial_text import OPEN, is_known
from phalanx.rules.foreign.shell.python_text import follow_python, program_text

_SED = re.compile(r"s([/|#,@:])((?:(?!\1).)*)\1((?:(?!\1).)*)\1([g]?)")
MOST_LINES = 1_000

ReadFile = Callable[[str], str | None]


def printed_output(argv: list[str], given: str | None, read: ReadFile) -> str | None:
    """Return the output of a command with `given` as its input; None if it is not known."""
    if not argv:
        return None
    name, arguments = argv[0].rpartition("/")[2], argv[1:]
    printer = PRINTERS.get(name)
    return printer(arguments, given, read) if printer else None


def _echo(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    newline, escapes = "\n", False
    while rest and re.fullmatch(r"-[neE]+", rest[0]):
        newline = "" if "n" in rest[0] else newline
        escapes |= "e" in rest[0]
        rest = rest[1:]
    text = " ".join(rest)
    if escapes:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    return text + newline


def _printf(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    if not rest or not is_known(rest[0]):
        return None
    format_text = rest[0].replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"')
    placeholders = re.findall(r"%[sd%]", format_text)
    value_placeholders = [placeholder for placeholder in placeholders if placeholder != "%%"]
    if re.sub(r"%[sd%]", "", format_text).count("%") or (
        value_placeholders and len(rest) - 1 != len(value_placeholders)
    ):
        return None
    values = iter(rest[1:])
    return re.sub(r"%[sd%]", lambda match: "%" if match.group() == "%%" else next(values), format_text)


def _cat(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    names = [name for name in rest if name == "-" or not name.startswith("-")]
    if not names:
        return given
    texts = [given if name == "-" else read(name) for name in names]
    return None if any(text is None for text in texts) else "".join(text or "" for text in texts)


def _sed(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    scripts, files, has_expression = [], [], False
    words = iter(rest)
    for word in words:
        if word == "-e":
            scripts.append(next(words, ""))
            has_expression = True
        elif word in ("-E", "-r", "-i"):
            continue
        elif word.startswith("-"):
            return None
        elif not scripts and not has_expression:
            scripts.append(word)
        else:
            files.append(word)
    text = read(files[0]) if len(files) == 1 else given if not files else None
    if text is None:
        return None
    for script in scripts:
        for command in filter(None, (command_text.strip() for command_text in re.split(r";(?=\s*s[/|#,@:])", script))):
            match = _SED.fullmatch(command)
            if match is None or re.search(r"[][*.^$\\+?(){}|]", match.group(2)) or re.search(r"[&\\]", match.group(3)):
                return None
            if OPEN in match.group(2):
                return None
            old, new, is_global = match.group(2), match.group(3), match.group(4)
            text = (
                text.replace(old, new)
                if is_global
                else "\n".join(line.replace(old, new, 1) for line in text.split("\n"))
            )
    return text


def _dirname(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    names = [argument for argument in rest if argument != "--"]
    if len(names) != 1 or not is_known(names[0]):
        return None
    return str(PurePosixPath(names[0]).parent) + "\n"


def _basename(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    if not rest or rest[0].startswith("-") or not is_known(" ".join(rest)):
        return None
    name = PurePosixPath(rest[0]).name
    return (name.removesuffix(rest[1]) if len(rest) > 1 else name) + "\n"


def _seq(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    if not all(re.fullmatch(r"-?\d{1,9}", argument) for argument in rest) or not 1 <= len(rest) <= 3:
        return None
    numbers = [int(argument) for argument in rest]
    first, step, last = (1, 1, numbers[0]) if len(numbers) == 1 else (numbers[0], 1, numbers[-1])
    step = numbers[1] if len(numbers) == 3 else step
    if step == 0 or abs(last - first) // abs(step) > MOST_LINES:
        return None
    return "".join(f"{number}\n" for number in range(first, last + (1 if step > 0 else -1), step))


def _expr(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    return _calculated(" ".join(argument.replace("\\*", "*") for argument in rest))


def _bc(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    text = (given or "").strip()
    return None if rest or not text or "scale" in text else _calculated(text)


def _calculated(text: str) -> str | None:
    def unknown(name: str) -> int:
        raise UnknownNumberError(name)

    if not re.fullmatch(r"[\d\s()+*/%-]+", text):
        return None
    try:
        return f"{evaluate_arithmetic(text, unknown)}\n"
    except UnknownNumberError:
        return None


def _tr(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    if given is None or not is_known(given):
        return None
    if rest in (["[:upper:]", "[:lower:]"], ["A-Z", "a-z"]):
        return given.lower()
    if rest in (["[:lower:]", "[:upper:]"], ["a-z", "A-Z"]):
        return given.upper()
    if len(rest) == 2 and len(rest[0]) == len(rest[1]) == 1 and rest[0] != "\\":
        return given.replace(rest[0], rest[1])
    if len(rest) == 2 and rest[0] == "-d" and len(rest[1]) == 1:
        return given.replace(rest[1], "")
    return None


def _cut(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    words = " ".join(rest)
    match = re.fullmatch(r"-d ?(.) -f ?(\d)|-f ?(\d) -d ?(.)", words)
    if given is None or not is_known(given) or match is None:
        return None
    delimiter, field_number = match.group(1) or match.group(4), int(match.group(2) or match.group(3))
    lines = []
    for line in given.splitlines():
        fields = line.split(delimiter)
        lines.append(line if len(fields) == 1 else fields[field_number - 1] if field_number <= len(fields) else "")
    return "".join(line + "\n" for line in lines)


def _same_path(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    names = [argument for argument in rest if not argument.startswith("-")]
    return names[0] + "\n" if len(names) == 1 else None


def _tee(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    return given


def _python(rest: list[str], given: str | None, read: ReadFile) -> str | None:
    """Return the output of `python -c text` and `python - << EOF`, if the program only prints."""
    program = program_text(rest, given)
    effects = follow_python(program, read) if program is not None else None
    return effects.printed if effects is not None and not effects.written else None


PRINTERS: dict[str, Callable[[list[str], str | None, ReadFile], str | None]] = {
    "echo": _echo,
    "printf": _printf,
    "cat": _cat,
    "sed": _sed,
    "dirname": _dirname,
    "basename": _basename,
    "seq": _seq,
    "expr": _expr,
    "bc": _bc,
    "tr": _tr,
    "cut": _cut,
    "realpath": _same_path,
    "readlink": _same_path,
    "tee": _tee,
    "python": _python,
    "python3": _python,
}
