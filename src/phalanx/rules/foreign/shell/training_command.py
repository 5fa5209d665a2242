"""Of all commands that a script would start, the one that trains: its arguments, its launcher's, and its files."""

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
    """By what the training command of a family is known among all that a script starts."""

    names: frozenset[str]  # arguments, of which it has at least two
    verbs: frozenset[tuple[str, str]] = frozenset()  # or a program and its verb, as `swift sft`
    asked: frozenset[str] = frozenset({"train_iters", "train_samples", "train_tokens", "lr"})  # goes before the others
    switches: frozenset[str] = SWITCHES  # arguments that take no word


MEGATRON_SIGNS = CommandSigns(names=TRAINING)
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_SBATCH = re.compile(r"^#SBATCH\s+(--[a-z-]+|-[A-Za-z])[= ]\s*(\S+)", re.MULTILINE)
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-p": "--partition", "-J": "--job-name", "-t": "--time"}
# `--save <PATH TO FOLDER>`: to be filled in by the reader; a shell takes it for two redirections and starts nothing.
_PLACEHOLDER = re.compile(r"(?<![<\w])<([A-Za-z][\w ./-]{0,60}[\w]|[A-Z])>(?=[\s\"'\\/,;]|$)", re.MULTILINE)
_MODULES = ("torch.distributed.launch", "torch.distributed.run", "torch.distributed.elastic")
MOST_FORKS = 24
STARTS_RANKS = "verb.starts_ranks"  # a leaf of our own: a launcher starts the ranks of a host, and not Slurm
ACCELERATE = "accelerate."  # leaves of the arguments of `accelerate launch` itself: some are spelled as the program's

Arguments = dict[str, tuple[str, ...]]  # flag as written -> its words; none for a switch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCommand:
    """The arguments of a training program and of what starts it, in every form that the script leaves open."""

    program: tuple[Arguments, ...]
    launcher: tuple[Arguments, ...]
    command: StartedCommand
    open_why: str = ""  # words in it that may be any argument


@dataclass(kw_only=True, slots=True)
class ScriptReading:
    """A script that was followed: its training commands, and what a caller could give it."""

    file: str
    text: str
    unknowns: UnknownTable
    commands: list[TrainingCommand]
    batch: dict[str, tuple[str, int]]  # #SBATCH option -> value, line
    unset: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    interpreter: Interpreter


def canonical_flag(flag: str) -> str:
    """
    >>> canonical_flag("--tensor-model-parallel-size")
    'tensor_model_parallel_size'
    """
    return flag.lstrip("-").replace("-", "_").lower()


def read_script(
    path: Path, given: Mapping[str, str], *, folder: Path | None = None, signs: CommandSigns = MEGATRON_SIGNS
) -> ScriptReading:
    """Follow a script; raises UserError for one that no shell would read."""
    text = read_text(path, noun="configuration")
    if len(text) > MOST_SCRIPT:
        raise mistake(str(path), f"is longer than {MOST_SCRIPT:,} characters", why="no training script is")
    text = text.replace(OPEN, "?").replace(CLOSE, "?").replace("\r\n", "\n")
    text = _PLACEHOLDER.sub(lambda hit: "${" + re.sub(r"\W+", "_", hit.group(1)) + "}", text)
    batch = _batch_options(text)
    shell = Interpreter(file=str(path), folder=path.parent if folder is None else folder, given=dict(given))
    _set_slurm(shell, batch)
    block, wrong = parse_statements(text)
    try:
        shell.run_block(block)
    except (TooLongError, RecursionError) as error:
        raise mistake(
            str(path), "takes more steps than a launch script does", why="loops are followed, not run"
        ) from error
    commands = _training_commands(shell.started, shell.unknowns, signs)
    if wrong is not None and not commands:
        raise mistake(
            f"{path}:{wrong.line}", f"is not a script that a shell reads: {wrong.what}", fix="check it with bash -n"
        ) from wrong
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
    found: dict[str, tuple[str, int]] = {}
    for match in _SBATCH.finditer(text):
        name = _SHORT.get(match.group(1), match.group(1)).removeprefix("--")
        found[name] = match.group(2), text.count("\n", 0, match.start()) + 1
    return found


def _set_slurm(shell: Interpreter, batch: Mapping[str, tuple[str, int]]) -> None:
    """What Slurm sets of the options that stand in the script."""
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
    found = [_split_command(one, unknowns, signs) for one in started if not one.argv[0].startswith("--")]
    bare = [one for one in started if one.argv[0].startswith("--")]
    if bare:  # a list of arguments without a program
        words = tuple(word for one in bare for word in one.argv)
        first = bare[0]
        whole = StartedCommand(argv=words, line=first.line, environment=first.environment, files=first.files)
        found.append(_split_command(whole, unknowns, signs))
    if signs.verbs:
        return [one for one in found if verb_of(one.command.argv, signs.verbs) is not None]
    training = [one for one in found if len(_names(one) & signs.names) >= 2]
    asked = [one for one in training if _names(one) & signs.asked]
    return asked or training


def verb_of(argv: Sequence[str], verbs: frozenset[tuple[str, str]]) -> tuple[str, str] | None:
    """The program and verb of a command that has one of them side by side.

    >>> verb_of(["env", "A=1", "/opt/bin/swift", "sft", "--model", "x"], frozenset({("swift", "sft")}))
    ('swift', 'sft')
    """
    pairs = ((one.rpartition("/")[2], two) for one, two in itertools.pairwise(argv))
    return next((pair for pair in pairs if pair in verbs), None)


def _names(command: TrainingCommand) -> set[str]:
    return {canonical_flag(flag) for arguments in command.program for flag in arguments}


def _split_command(command: StartedCommand, unknowns: UnknownTable, signs: CommandSigns) -> TrainingCommand:
    variants = _variants(command.argv, unknowns)
    split = [program_at(words) for words in variants]
    open_why = ""
    for words in variants:
        for word in words[1:]:
            cause = unknowns.alone(word)
            flag = word.startswith("--") and not is_known(word.partition("=")[0])
            if flag and cause is None:  # --$FORMAT: which flag it is nobody knows
                cause = unknowns.first(word)
                open_why = open_why or (cause.why if cause is not None else "")
            elif cause is not None and cause.kind != "unset" and not _is_value(words, word, signs.switches):
                open_why = open_why or cause.why
    if not open_why and not signs.verbs and (wrapper := _wrapper_of(command.argv, split)):
        open_why = f"{wrapper} is not Megatron's own program, and may add any"
    return TrainingCommand(
        program=tuple(
            parse_flags(words[at:], switches=signs.switches) for words, at in zip(variants, split, strict=True)
        ),
        launcher=tuple(parse_flags(words[:at], launcher=True) for words, at in zip(variants, split, strict=True)),
        command=command,
        open_why=open_why,
    )


def _wrapper_of(argv: Sequence[str], split: Sequence[int]) -> str:
    """The script or program that a command hands its arguments to, where it starts no program of Python itself."""
    if any(split) or argv[0].startswith("--"):
        return ""
    before = list(itertools.takewhile(lambda word: not word.startswith("--"), argv))
    scripts = [word for word in before if word.endswith((".sh", ".bash", "-cli")) and is_known(word)]
    if before and before[0].startswith("./") and is_known(before[0]):
        scripts.append(before[0])
    return scripts[0][:80] if scripts else ""


def _is_value(words: Sequence[str], word: str, switches: frozenset[str]) -> bool:
    """Whether a word follows a flag that takes one."""
    place = words.index(word)
    before = words[place - 1] if place else ""
    return bool(_FLAG.fullmatch(before)) and "=" not in before and canonical_flag(before) not in switches


def _variants(argv: Sequence[str], unknowns: UnknownTable) -> list[list[str]]:
    """The command line with each word that stands for several replaced by each of them in turn.

    Each fork is taken on its own, the others in their first way: what differs in any of them is not known.
    """
    base = list(argv)
    found: list[list[str]] = []
    if len(base) >= 1 and (whole := _whole_commands(base[0], unknowns)):  # ${CMD}, made in one of several ways
        found = [[*choice, *base[1:]] for choice in whole[1:]]
        base = [*whole[0], *base[1:]]
    for _ in range(MOST_FORKS):
        place = next((at for at, word in enumerate(base) if _choices_of(word, unknowns)), -1)
        if place < 0:
            break
        choices = _choices_of(base[place], unknowns)
        found += [[*base[:place], *choice, *base[place + 1 :]] for choice in choices[1:]]
        base = [*base[:place], *choices[0], *base[place + 1 :]]
    # Ways that were left behind at an early fork still hold later ones: they take these in their first way.
    return [_first_ways(words, unknowns) for words in [base, *found]]


def _whole_commands(word: str, unknowns: UnknownTable) -> list[list[str]]:
    """The command lines that one word in the place of a program may stand for."""
    cause = unknowns.alone(word)
    if cause is None or cause.kind != "either":
        return []
    choices = [[part for one in choice for part in one.split()] for choice in cause.choices]
    return choices if any(part.startswith("-") for choice in choices for part in choice) else []


def _first_ways(words: list[str], unknowns: UnknownTable) -> list[str]:
    found: list[str] = []
    waiting, forks = list(reversed(words)), 0
    while waiting:
        word = waiting.pop()
        choices = _choices_of(word, unknowns) if forks < MOST_FORKS else []
        if choices:
            forks += 1
            waiting += reversed(choices[0])
        else:
            found.append(word)
    return found


def _choices_of(word: str, unknowns: UnknownTable) -> list[list[str]]:
    """The words that one word may stand for, where that decides which flags there are."""
    if is_known(word):  # nearly all are, and every word of every way is asked for
        return []
    found = MARK.search(word)
    if found is None:
        return []
    cause = unknowns.entries[int(found.group(1))]
    if cause.kind != "either" or not cause.choices:
        return []
    if found.span() == (0, len(word)):
        flags = any(one.startswith("-") for choice in cause.choices for one in choice)
        return [_first_command(choice) for choice in cause.choices] if flags else []
    if not word.startswith("-") or "=" in word[: found.start()]:
        return []
    return [[word[: found.start()] + " ".join(choice) + word[found.end() :]] for choice in cause.choices]


SEPARATORS = frozenset({";", "&&", "||", "|", "&"})


def _first_command(choice: Sequence[str]) -> list[str]:
    """The words of a text up to where it ends the command and begins another one."""
    parts = [part for one in choice for part in one.split()]
    for place, part in enumerate(parts):
        if part in SEPARATORS or part.endswith(";"):
            return [*parts[:place], *([part.rstrip(";")] if part.rstrip(";") and part not in SEPARATORS else [])]
    return parts


def program_at(words: Sequence[str]) -> int:
    """Where the arguments of the program begin."""
    if (start := accelerate_at(words)) >= 0:
        return program_of_accelerate(words, start)
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words) and not words[place + 1].startswith(_MODULES):
            return place + 2
        before = words[place - 1] if place else ""
        if word.endswith(".py") and (not before.startswith("--") or is_launcher_switch(before)):
            return place + 1
    return 0


def parse_flags(words: Sequence[str], *, launcher: bool = False, switches: frozenset[str] = SWITCHES) -> Arguments:
    """Flags with their words, as argparse groups them; of a flag given twice the last one holds."""
    found: Arguments = {}
    spelled: dict[str, str] = {}  # canonical -> as it was last written
    flag = ""
    for word in words:
        if _FLAG.fullmatch(word) and is_known(word.partition("=")[0]) and not re.fullmatch(r"-\d.*", word):
            flag, equals, value = word.partition("=")
            found.pop(spelled.get(canonical_flag(flag), flag), None)
            spelled[canonical_flag(flag)] = flag
            found[flag] = (value,) if equals else ()
            if equals:
                flag = ""
        elif flag and canonical_flag(flag) not in switches:
            found[flag] = (*found[flag], word)
            if launcher:
                flag = ""
    return found


# ---- leaves ---------------------------------------------------------------------------------------------------------


def leaves_of_script(reading: ScriptReading) -> dict[str, Leaf]:
    """The settings that reach the training program; what the script leaves open is marked as not known."""
    places = _flag_lines(reading.text)
    found: dict[str, Leaf] = {}
    for name, (value, line) in reading.batch.items():
        found[f"SBATCH.{name}"] = Leaf(key=f"SBATCH.{name}", value=value, line=line)
    for one in reading.commands[-1:]:
        for name, value in one.command.environment.items():
            line = _assigned_line(reading.text, name)
            leaf = _leaf(reading, f"env.{name}", [(value,)], line)
            found[f"env.{name}"] = replace(leaf, comment=_comment_at(reading.text, line))
    first_line = reading.commands[0].command.line if reading.commands else 0
    if any(starts_ranks(one.command.argv) for one in reading.commands):
        found[STARTS_RANKS] = Leaf(key=STARTS_RANKS, value=True, line=first_line)
    for kind in ("launcher", "program"):
        variants = [arguments for one in reading.commands for arguments in getattr(one, kind)]
        for flag in dict.fromkeys(flag for arguments in variants for flag in arguments):
            if not flag.startswith("--"):
                continue
            values = [_words_of(arguments, flag) for arguments in variants]
            apart = kind == "launcher" and any(accelerate_at(one.command.argv) >= 0 for one in reading.commands)
            key = f"{ACCELERATE}{canonical_flag(flag)}" if apart else flag
            found[key] = _leaf(reading, key, values, places.get(flag, 0) or first_line)
    if len(found) > MOST_LEAVES:
        raise mistake(reading.file, f"holds more than {MOST_LEAVES:,} settings", why="no training run does")
    return found


def notes_of_script(reading: ScriptReading) -> tuple[str, ...]:
    """That a script starts several trainings which differ: none of them is judged alone."""
    lines = sorted({one.command.line for one in reading.commands})
    if len({tuple(one.command.argv) for one in reading.commands}) < 2:
        return ()
    where = f"lines {', '.join(map(str, lines[:6]))}" if len(lines) > 1 else f"line {lines[0]}"
    return (f"several trainings are started ({where}): only what they agree on is known and judged",)


def _words_of(arguments: Arguments, flag: str) -> tuple[str, ...] | None:
    if flag in arguments:
        return arguments[flag]
    same = canonical_flag(flag)
    return next((words for other, words in arguments.items() if canonical_flag(other) == same), None)


def _leaf(reading: ScriptReading, key: str, values: Iterable[tuple[str, ...] | None], line: int) -> Leaf:
    seen = list(dict.fromkeys(values))
    unknowns = reading.unknowns
    if len(seen) > 1:
        why = _fork_reason(reading)
        shown = " or ".join("not given" if one is None else " ".join(one) or "given" for one in seen[:4])
        return Leaf(key=key, value="$?", line=line, unknown=f"{unknowns.shown(shown)}: {why}")
    words = _own_words(seen[0] or ())
    known = [unknowns.shown(word) for word in words]
    cause = next((found for word in words if (found := unknowns.first(word)) is not None), None)
    value: object = True if not words else known[0] if len(known) == 1 else known
    if cause is None:
        return Leaf(key=key, value=value, line=line)
    # A list of words that ends in a variable which nothing sets: the shell leaves nothing there.
    where = f", {cause.file}:{cause.line}" if cause.line and " line " not in cause.why else ""
    return Leaf(key=key, value=value, line=line, unknown=f"depends on {cause.why}{where}")


def _own_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Behind true or false come further arguments, if anything: no list begins so.

    >>> _own_words(("True", "$EXTRA")), _own_words(("a", "b"))
    (('True',), ('a', 'b'))
    """
    return words[:1] if words and words[0].lower() in ("true", "false") else words


def _fork_reason(reading: ScriptReading) -> str:
    for one in reading.commands:
        for word in one.command.argv:
            cause = reading.unknowns.alone(word)
            if cause is not None and cause.kind == "either":
                return f"depends on {cause.why}"
    lines = ", ".join(dict.fromkeys(str(one.command.line) for one in reading.commands))
    return f"the commands in lines {lines} differ"


def _flag_lines(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        for match in re.finditer(r"(?<![\w-])--[A-Za-z][\w.-]*", line):
            found[match.group()] = number
    return found


def _assigned_line(text: str, name: str) -> int:
    found = re.search(rf"^(?![ \t]*#).*?\b({re.escape(name)})=", text, re.MULTILINE)
    return text.count("\n", 0, found.start(1)) + 1 if found else 0


def _comment_at(text: str, line: int) -> str:
    """The comment behind a line, and those on the lines right above it."""
    lines = text.splitlines()
    if not 0 < line <= len(lines):
        return ""
    found = [lines[line - 1].partition(" #")[2].strip()]
    for above in reversed(lines[: line - 1][-4:]):
        if not above.lstrip().startswith("#"):
            break
        found.insert(0, above.strip(" \t#"))
    return " ".join(one for one in found if one)[:300]
