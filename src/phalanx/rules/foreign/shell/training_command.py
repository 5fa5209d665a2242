"""Selection of the training command among all commands that a script would start: arguments, launcher, and files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.errors import mistake
from phalanx.io.files import read_text
from phalanx.rules.foreign.conversion import MOST_LEAVES, Leaf
from phalanx.rules.foreign.shell.flags_without_value import SWITCHES
from phalanx.rules.foreign.shell.interpreter import Interpreter, TooLongError
from phalanx.rules.foreign.shell.launcher_arguments import (
    accelerate_at,
    is_launcher_switch,
    program_of_accelerate,
    starts_ranks,
)
from phalanx.rules.foreign.shell.partial_text import CLOSE, MARK, OPEN, UnknownTable, is_known
from phalanx.rules.foreign.shell.script_parser import parse_statements
from phalanx.rules.foreign.shell.script_state import StartedCommand

MOST_SCRIPT = 1 << 18
# Arguments of which a training command of Megatron has at least two.
TRAINING = frozenset(
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "model_parallel_size",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "micro_batch_size",
        "global_batch_size",
        "seq_length",
        "train_iters",
        "train_samples",
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSigns:
    """The signs that identify the training command of a program family among all commands of a script."""

    names: frozenset[str]  # arguments of which it has at least two
    verbs: frozenset[tuple[str, str]] = frozenset()  # or a program and its verb, such as `swift sft`
    # A command with one of these is preferred
    asked: frozenset[str] = frozenset({"train_iters", "train_samples", "train_tokens", "lr"})
    switches: frozenset[str] = SWITCHES  # arguments without a value


MEGATRON_SIGNS = CommandSigns(names=TRAINING)
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_SBATCH = re.compile(r"^#SBATCH\s+(--[a-z-]+|-[A-Za-z])[= ]\s*(\S+)", re.MULTILINE)
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-p": "--partition", "-J": "--job-name", "-t": "--time"}
# A placeholder such as `--save <PATH TO FOLDER>`, which the user fills in; a shell reads it as two redirections.
_PLACEHOLDER = re.compile(r"(?<![<\w])<([A-Za-z][\w ./-]{0,60}[\w]|[A-Z])>(?=[\s\"'\\/,;]|$)", re.MULTILINE)
_MODULES = ("torch.distributed.launch", "torch.distributed.run", "torch.distributed.elastic")
MOST_FORKS = 24
# A leaf added here: a launcher, not Slurm, starts the ranks of a host
STARTS_RANKS = "verb.starts_ranks"
# Prefix of the arguments of `accelerate launch` itself, some of which have the same names as the program's.
ACCELERATE = "accelerate."

# Argument as written -> its values; none for a switch
Arguments = dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCommand:
    """The arguments of a training program and of its launcher, in every variant that the script leaves open."""

    program: tuple[Arguments, ...]
    launcher: tuple[Arguments, ...]
    command: StartedCommand
    open_why: str = ""  # the reason why it may have further arguments


@dataclass(kw_only=True, slots=True)
class ScriptReading:
    """A script that was followed: its training commands, and the variables that a caller could set."""

    file: str
    text: str
    unknowns: UnknownTable
    commands: list[TrainingCommand]
    batch: dict[str, tuple[str, int]]  # #SBATCH option -> value, line
    unset: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    interpreter: Interpreter


def canonical_flag(flag: str) -> str:
    """Return an argument's name without dashes, with underscores, in lower case.

    >>> canonical_flag("--tensor-model-parallel-size")
    'tensor_model_parallel_size'
    """
    return flag.lstrip("-").replace("-", "_").lower()


def read_script(
    path: Path, given: Mapping[str, str], *, folder: Path | None = None, signs: CommandSigns = MEGATRON_SIGNS
) -> ScriptReading:
    """Follow a script; raise UserError if no shell accepts it or it takes too many steps."""
    text = read_text(path, noun="configuration")
    if len(text) > MOST_SCRIPT:
        raise mistake(str(path), f"is longer than {MOST_SCRIPT:,} characters", why="no training script is")
    text = text.replace(OPEN, "?").replace(CLOSE, "?").replace("\r\n", "\n")
    text = _PLACEHOLDER.sub(lambda match: "${" + re.sub(r"\W+", "_", match.group(1)) + "}", text)
    batch = _batch_options(text)
    shell = Interpreter(file=str(path), folder=path.parent if folder is None else folder, given=dict(given))
    _set_slurm(shell, batch)
    block, syntax_error = parse_statements(text)
    try:
        shell.run_block(block)
    except (TooLongError, RecursionError) as error:
        raise mistake(
            str(path), "takes more steps than a launch script does", why="loops are followed, not run"
        ) from error
    commands = _training_commands(shell.started, shell.unknowns, signs)
    if syntax_error is not None and not commands:
        raise mistake(
            f"{path}:{syntax_error.line}",
            f"is not a script that a shell reads: {syntax_error.what}",
            fix="check it with bash -n",
        ) from syntax_error
    return ScriptReading(
        file=str(path),
        text=text,
        unknowns=shell.unknowns,
        commands=commands,
        batch=batch,
        unset=shell.unset_used,
        files=shell.state.files,
        interpreter=shell,
    )


def _batch_options(text: str) -> dict[str, tuple[str, int]]:
    options: dict[str, tuple[str, int]] = {}
    for match in _SBATCH.finditer(text):
        name = _SHORT.get(match.group(1), match.group(1)).removeprefix("--")
        options[name] = match.group(2), text.count("\n", 0, match.start()) + 1
    return options


def _set_slurm(shell: Interpreter, batch: Mapping[str, tuple[str, int]]) -> None:
    """Set the variables that Slurm derives from the options in the script."""
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
        "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
        "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    }
    for option, variables in names.items():
        value = batch.get(option, ("", 0))[0].rpartition(":")[2]
        if value.isdigit():
            for name in variables:
                shell.state.variables.setdefault(name, value)


def _training_commands(
    started: Sequence[StartedCommand], unknowns: UnknownTable, signs: CommandSigns
) -> list[TrainingCommand]:
    split_commands = [
        _split_command(command, unknowns, signs) for command in started if not command.argv[0].startswith("--")
    ]
    argument_lists = [command for command in started if command.argv[0].startswith("--")]
    if argument_lists:  # a list of arguments without a program
        words = tuple(word for command in argument_lists for word in command.argv)
        first = argument_lists[0]
        joined_command = StartedCommand(argv=words, line=first.line, environment=first.environment, files=first.files)
        split_commands.append(_split_command(joined_command, unknowns, signs))
    if signs.verbs:
        return [command for command in split_commands if verb_of(command.command.argv, signs.verbs) is not None]
    training = [command for command in split_commands if len(_names(command) & signs.names) >= 2]
    preferred = [command for command in training if _names(command) & signs.asked]
    return preferred or training


def verb_of(argv: Sequence[str], verbs: frozenset[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the program and verb of a command that contains one of the pairs; None if it contains none.

    >>> verb_of(["env", "A=1", "/opt/bin/swift", "sft", "--model", "x"], frozenset({("swift", "sft")}))
    ('swift', 'sft')
    """
    pairs = ((word.rpartition("/")[2], next_word) for word, next_word in itertools.pairwise(argv))
    return next((pair for pair in pairs if pair in verbs), None)


def _names(command: TrainingCommand) -> set[str]:
    return {canonical_flag(flag) for arguments in command.program for flag in arguments}


def _split_command(command: StartedCommand, unknowns: UnknownTable, signs: CommandSigns) -> TrainingCommand:
    variants = _variants(command.argv, unknowns)
    program_starts = [program_at(words) for words in variants]
    open_why = ""
    for words in variants:
        for word in words[1:]:
            cause = unknowns.alone(word)
            is_partial_flag = word.startswith("--") and not is_known(word.partition("=")[0])
            # --$FORMAT: the argument is not known
            if is_partial_flag and cause is None:
                cause = unknowns.first(word)
                open_why = open_why or (cause.why if cause is not None else "")
            elif cause is not None and cause.kind != "unset" and not _is_value(words, word, signs.switches):
                open_why = open_why or cause.why
    if not open_why and not signs.verbs and (wrapper := _wrapper_of(command.argv, program_starts)):
        open_why = f"{wrapper} is not Megatron's own program, and may add any"
    return TrainingCommand(
        program=tuple(
            parse_flags(words[program_start:], switches=signs.switches)
            for words, program_start in zip(variants, program_starts, strict=True)
        ),
        launcher=tuple(
            parse_flags(words[:program_start], launcher=True)
            for words, program_start in zip(variants, program_starts, strict=True)
        ),
        command=command,
        open_why=open_why,
    )


def _wrapper_of(argv: Sequence[str], split: Sequence[int]) -> str:
    """Return the script or program that gets the arguments, if the command starts no Python program itself."""
    if any(split) or argv[0].startswith("--"):
        return ""
    leading_words = list(itertools.takewhile(lambda word: not word.startswith("--"), argv))
    scripts = [word for word in leading_words if word.endswith((".sh", ".bash", "-cli")) and is_known(word)]
    if leading_words and leading_words[0].startswith("./") and is_known(leading_words[0]):
        scripts.append(leading_words[0])
    return scripts[0][:80] if scripts else ""


def _is_value(words: Sequence[str], word: str, switches: frozenset[str]) -> bool:
    """Return whether a word follows an argument that takes a value."""
    place = words.index(word)
    previous = words[place - 1] if place else ""
    return bool(_FLAG.fullmatch(previous)) and "=" not in previous and canonical_flag(previous) not in switches


def _variants(argv: Sequence[str], unknowns: UnknownTable) -> list[list[str]]:
    """Return variants of the command line, with each word that has alternatives replaced by each of them in turn.

    Each such word is varied alone, with the first alternative of the others: a value that differs in any variant is
    unknown.
    """
    base = list(argv)
    variants: list[list[str]] = []
    if len(base) >= 1 and (
        whole_commands := _whole_commands(base[0], unknowns)
    ):  # ${CMD}, set in one of several branches
        variants = [[*choice, *base[1:]] for choice in whole_commands[1:]]
        base = [*whole_commands[0], *base[1:]]
    for _ in range(MOST_FORKS):
        place = next((index for index, word in enumerate(base) if _choices_of(word, unknowns)), -1)
        if place < 0:
            break
        choices = _choices_of(base[place], unknowns)
        variants += [[*base[:place], *choice, *base[place + 1 :]] for choice in choices[1:]]
        base = [*base[:place], *choices[0], *base[place + 1 :]]
    # Variants created at an early word still contain later ones, which take their first alternative.
    return [_first_ways(words, unknowns) for words in [base, *variants]]


def _whole_commands(word: str, unknowns: UnknownTable) -> list[list[str]]:
    """Return the command lines that a single word in place of the program may expand to."""
    cause = unknowns.alone(word)
    if cause is None or cause.kind != "either":
        return []
    choices = [[part for text in choice for part in text.split()] for choice in cause.choices]
    return choices if any(part.startswith("-") for choice in choices for part in choice) else []


def _first_ways(words: list[str], unknowns: UnknownTable) -> list[str]:
    result: list[str] = []
    waiting, num_forks = list(reversed(words)), 0
    while waiting:
        word = waiting.pop()
        choices = _choices_of(word, unknowns) if num_forks < MOST_FORKS else []
        if choices:
            num_forks += 1
            waiting += reversed(choices[0])
        else:
            result.append(word)
    return result


def _choices_of(word: str, unknowns: UnknownTable) -> list[list[str]]:
    """Return the alternatives of a word, if they decide which arguments there are."""
    # Nearly all are, and this is called for every word of every variant
    if is_known(word):
        return []
    match = MARK.search(word)
    if match is None:
        return []
    cause = unknowns.entries[int(match.group(1))]
    if cause.kind != "either" or not cause.choices:
        return []
    if match.span() == (0, len(word)):
        flags = any(text.startswith("-") for choice in cause.choices for text in choice)
        return [_first_command(choice) for choice in cause.choices] if flags else []
    if not word.startswith("-") or "=" in word[: match.start()]:
        return []
    return [[word[: match.start()] + " ".join(choice) + word[match.end() :]] for choice in cause.choices]


SEPARATORS = frozenset({";", "&&", "||", "|", "&"})


def _first_command(choice: Sequence[str]) -> list[str]:
    """Return the words of a text up to a separator that ends the command."""
    parts = [part for text in choice for part in text.split()]
    for place, part in enumerate(parts):
        if part in SEPARATORS or part.endswith(";"):
            return [*parts[:place], *([part.rstrip(";")] if part.rstrip(";") and part not in SEPARATORS else [])]
    return parts


def program_at(words: Sequence[str]) -> int:
    """Return the index at which the arguments of the program begin; 0 if there is none."""
    if (start := accelerate_at(words)) >= 0:
        return program_of_accelerate(words, start)
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words) and not words[place + 1].startswith(_MODULES):
            return place + 2
        previous = words[place - 1] if place else ""
        if word.endswith(".py") and (not previous.startswith("--") or is_launcher_switch(previous)):
            return place + 1
    return 0


def parse_flags(words: Sequence[str], *, launcher: bool = False, switches: frozenset[str] = SWITCHES) -> Arguments:
    """Group arguments with their values as argparse does; of an argument given twice the last one holds."""
    arguments: Arguments = {}
    # Canonical name -> its last spelling
    last_spelling: dict[str, str] = {}
    flag = ""
    for word in words:
        if _FLAG.fullmatch(word) and is_known(word.partition("=")[0]) and not re.fullmatch(r"-\d.*", word):
            flag, equals, value = word.partition("=")
            arguments.pop(last_spelling.get(canonical_flag(flag), flag), None)
            last_spelling[canonical_flag(flag)] = flag
            arguments[flag] = (value,) if equals else ()
            if equals:
                flag = ""
        elif flag and canonical_flag(flag) not in switches:
            arguments[flag] = (*arguments[flag], word)
            if launcher:
                flag = ""
    return arguments


# ---- leaves ---------------------------------------------------------------------------------------------------------


def leaves_of_script(reading: ScriptReading) -> dict[str, Leaf]:
    """Return the settings that reach the training program; those that the script leaves open are marked as unknown."""
    flag_lines = _flag_lines(reading.text)
    leaves: dict[str, Leaf] = {}
    for name, (value, line) in reading.batch.items():
        leaves[f"SBATCH.{name}"] = Leaf(key=f"SBATCH.{name}", value=value, line=line)
    for command in reading.commands[-1:]:
        for name, value in command.command.environment.items():
            line = _assigned_line(reading.text, name)
            leaf = _leaf(reading, f"env.{name}", [(value,)], line)
            leaves[f"env.{name}"] = replace(leaf, comment=_comment_at(reading.text, line))
    first_line = reading.commands[0].command.line if reading.commands else 0
    if any(starts_ranks(command.command.argv) for command in reading.commands):
        leaves[STARTS_RANKS] = Leaf(key=STARTS_RANKS, value=True, line=first_line)
    for kind in ("launcher", "program"):
        variants = [arguments for command in reading.commands for arguments in getattr(command, kind)]
        for flag in dict.fromkeys(flag for arguments in variants for flag in arguments):
            if not flag.startswith("--"):
                continue
            values = [_words_of(arguments, flag) for arguments in variants]
            is_accelerate = kind == "launcher" and any(
                accelerate_at(command.command.argv) >= 0 for command in reading.commands
            )
            key = f"{ACCELERATE}{canonical_flag(flag)}" if is_accelerate else flag
            leaves[key] = _leaf(reading, key, values, flag_lines.get(flag, 0) or first_line)
    if len(leaves) > MOST_LEAVES:
        raise mistake(reading.file, f"holds more than {MOST_LEAVES:,} settings", why="no training run does")
    return leaves


def notes_of_script(reading: ScriptReading) -> tuple[str, ...]:
    """Return a note if a script starts several different trainings, of which none is judged alone."""
    lines = sorted({command.command.line for command in reading.commands})
    if len({tuple(command.command.argv) for command in reading.commands}) < 2:
        return ()
    line_text = f"lines {', '.join(map(str, lines[:6]))}" if len(lines) > 1 else f"line {lines[0]}"
    return (f"several trainings are started ({line_text}): only what they agree on is known and judged",)


def _words_of(arguments: Arguments, flag: str) -> tuple[str, ...] | None:
    if flag in arguments:
        return arguments[flag]
    canonical_name = canonical_flag(flag)
    return next(
        (words for other_flag, words in arguments.items() if canonical_flag(other_flag) == canonical_name), None
    )


def _leaf(reading: ScriptReading, key: str, values: Iterable[tuple[str, ...] | None], line: int) -> Leaf:
    distinct_values = list(dict.fromkeys(values))
    unknowns = reading.unknowns
    if len(distinct_values) > 1:
        reason = _fork_reason(reading)
        alternatives = " or ".join(
            "not given" if words_given is None else " ".join(words_given) or "given"
            for words_given in distinct_values[:4]
        )
        return Leaf(key=key, value="$?", line=line, unknown=f"{unknowns.shown(alternatives)}: {reason}")
    words = _own_words(distinct_values[0] or ())
    shown_words = [unknowns.shown(word) for word in words]
    cause = next((unknown for word in words if (unknown := unknowns.first(word)) is not None), None)
    value: object = True if not words else shown_words[0] if len(shown_words) == 1 else shown_words
    if cause is None:
        return Leaf(key=key, value=value, line=line)
    # A list of words may end in a variable that nothing sets: the shell leaves nothing there.
    location = f", {cause.file}:{cause.line}" if cause.line and " line " not in cause.why else ""
    return Leaf(key=key, value=value, line=line, unknown=f"depends on {cause.why}{location}")


def _own_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Drop the words after true or false, which are further arguments: no list begins with these.

    >>> _own_words(("True", "$EXTRA")), _own_words(("a", "b"))
    (('True',), ('a', 'b'))
    """
    return words[:1] if words and words[0].lower() in ("true", "false") else words


def _fork_reason(reading: ScriptReading) -> str:
    for command in reading.commands:
        for word in command.command.argv:
            cause = reading.unknowns.alone(word)
            if cause is not None and cause.kind == "either":
                return f"depends on {cause.why}"
    lines = ", ".join(dict.fromkeys(str(command.command.line) for command in reading.commands))
    return f"the commands in lines {lines} differ"


def _flag_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        for match in re.finditer(r"(?<![\w-])--[A-Za-z][\w.-]*", line):
            lines[match.group()] = number
    return lines


def _assigned_line(text: str, name: str) -> int:
    match = re.search(rf"^(?![ \t]*#).*?\b({re.escape(name)})=", text, re.MULTILINE)
    return text.count("\n", 0, match.start(1)) + 1 if match else 0


def _comment_at(text: str, line: int) -> str:
    """Return the comment on a line, and those on the lines directly above it."""
    lines = text.splitlines()
    if not 0 < line <= len(lines):
        return ""
    comments = [lines[line - 1].partition(" #")[2].strip()]
    for line_above in reversed(lines[: line - 1][-4:]):
        if not line_above.lstrip().startswith("#"):
            break
        comments.insert(0, line_above.strip(" \t#"))
    return " ".join(comment for comment in comments if comment)[:300]
