"""The `phalanx` command: finds the verb, imports only that verb's module, and turns errors into exit codes."""

from __future__ import annotations

import os
import sys

# Everything else is imported inside `main`'s guard: Ctrl-C in the first milliseconds must not print a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.cli.signals import StopSignals
    from phalanx.errors import PhalanxError

# verb -> (module with `configure(parser)` and `run(args) -> exit code`, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "init": ("phalanx.cli.init", "write a commented job file for this machine or a cluster"),
    "show": ("phalanx.cli.show", "print every resolved value of a job and where it came from"),
    "cluster": ("phalanx.cli.cluster", "describe this machine or a cluster such as 8xH100:16"),
    "probe": ("phalanx.cli.probe", "measure this machine in under 30 s; later plans use the profile"),
    "plan": ("phalanx.cli.plan", "find the best layout, its reasons and its bill"),
    "sim": ("phalanx.cli.sim", "a step of a plan on a fabric, or months of it with failures"),
    "fabric": ("phalanx.cli.fabric", "the network for N GPUs: designs, their cost, and what they lose"),
    "check": ("phalanx.cli.check", "the training specification against a job, a plan or a run"),
    "rules": ("phalanx.cli.rules", "list the rules of the training specification"),
    "explain": ("phalanx.cli.explain", "one rule, with the numbers of a job in it"),
    "trace": ("phalanx.cli.trace", "the real step of ranks of a job of any size, without the ranks"),
    "train": ("phalanx.cli.train", "train a job, or go on with a run; saves on Ctrl-C"),
    "watch": ("phalanx.cli.watch", "follow a run in the terminal, also over ssh"),
    "report": ("phalanx.cli.report", "a run as one HTML file and a page of Markdown"),
    "diff": ("phalanx.cli.diff", "what differs between two runs, plans or jobs"),
    "agent": ("phalanx.cli.agent", "be one host of a run that was prepared on another"),
    "web": ("phalanx.cli.web", "a page over a folder of runs: live, read-only, on this machine"),
    "drill": ("phalanx.cli.drill", "break a real run on purpose, and prove what came of it"),
    "verify": ("phalanx.cli.verify", "prove that a layout computes what one process computes"),
    "import": ("phalanx.cli.import_", "another trainer's configuration as a job file"),
    "export": ("phalanx.cli.export", "write a run's weights as a Hugging Face folder"),
    "validate": ("phalanx.cli.validate", "predict a table of published runs and report the error"),
    "data": ("phalanx.cli.data", "build token shards from text, show and verify them"),
    "metrics": ("phalanx.cli.metrics", "a run's numbers for Prometheus, OTLP, TensorBoard, MLflow, W&B"),
    "calibrate": ("phalanx.cli.calibrate", "refit a few constants from steps measured on your system"),
}

EPILOG = """\
exit codes: 0 success, 1 findings, 2 invalid job or command, 3 system failure
start with: phalanx init job.toml && phalanx plan job.toml
"""

INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM
PIPE_CLOSED = 141  # 128 + SIGPIPE: whoever read our output had enough


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the return value is the exit code of the process."""
    try:
        from phalanx.cli.signals import StopSignals, Terminated, die_of_sigterm

        stop = StopSignals()
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        if argv is None:  # we are the program, and stay it until the interpreter is gone
            stop.listen()
        stop.code = _run(stop, list(sys.argv[1:] if argv is None else argv))
        return stop.code
    except Terminated:
        die_of_sigterm()
        return TERMINATED
    finally:
        stop.unwound()


def _run(stop: StopSignals, arguments: list[str]) -> int:
    """The exit code of the verb, however it ends but by SIGTERM."""
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except Exception as error:
        # A library may turn Ctrl-C into an error of its own, as an import in C does, and ranks that the terminal
        # stopped too are ranks that failed.
        if stop.received:
            print(f"stopped by Ctrl-C, in the middle of something ({type(error).__name__})", file=sys.stderr)
            return INTERRUPTED
        return _failed(error)


def _drop_output() -> None:
    """Python flushes stdout once more at exit and would print a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: Exception) -> int:
    from phalanx.errors import PhalanxError

    if isinstance(error, PhalanxError):
        print(error, file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and error.filename is None and _full(error):
        _drop_output()
        print(f"phalanx: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 3
    return _apologise(error)


def _full(error: OSError) -> bool:
    """A full disk, quota or file-size limit, or a failing device, behind stdout."""
    import errno

    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    verb, *rest = arguments
    if verb in ("-V", "--version"):
        from phalanx.cli.output import own_version

        print(f"phalanx {own_version()}")
        return 0
    if verb not in VERBS:
        raise _unknown(verb)
    from importlib import import_module

    from phalanx.cli.parser import Parser

    module_name, help_line = VERBS[verb]
    module = import_module(module_name)
    parser = Parser(prog=f"phalanx {verb}", description=help_line)
    module.configure(parser)
    return int(module.run(parser.parse_args(rest)))


def usage() -> str:
    """The top-level help, from the table alone."""
    verbs = "\n".join(f"  {verb:<10} {help_line}" for verb, (_, help_line) in VERBS.items())
    return (
        "usage: phalanx VERB [options]     phalanx VERB --help     phalanx --version\n\n"
        "One job file from a laptop to a hundred thousand GPUs.\n\n"
        f"verbs:\n{verbs}\n\n{EPILOG}"
    )


def _unknown(verb: str) -> PhalanxError:
    from phalanx.errors import mistake, nearest

    close = nearest(verb, VERBS)
    fix = f"did you mean phalanx {close}?" if close else f"the verbs are {', '.join(VERBS)}"
    kind = "option" if verb.startswith("-") else "verb"
    return mistake("phalanx", f'there is no {kind} "{verb[:60]}"', fix=fix)


def _apologise(error: Exception) -> int:
    if os.environ.get("PHALANX_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    from phalanx.io.visible import visible

    text = visible(str(error)).splitlines()
    print(
        f"phalanx: sorry, something failed that should not: {type(error).__name__}: {text[0] if text else ''}",
        file=sys.stderr,
    )
    print("  the job may be fine; run again with PHALANX_DEBUG=1 for the trace, and report it", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
