"""`phalanx kernels`: list, measure and verify GPU kernels.

Further sub-commands write a template of a kernel and measure how well a language model writes kernels.
"""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import OnOff, add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `phalanx kernels`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    line = "list operations, their variants, where they run and their error bounds"
    add_json(verbs.add_parser("list", help=line, description=line))
    _configure_bench(verbs)
    _configure_verify(verbs)
    line = "write a template kernel with its reference, test and bench"
    new = verbs.add_parser("new", help=line, description=line)
    new.add_argument("op", metavar="OP", help="an operation of phalanx kernels list")
    new.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    add_json(new)
    _configure_skill_eval(verbs)


def _configure_bench(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `phalanx kernels bench` and its options."""
    line = "measure an operation's variants against eager PyTorch, torch.compile and the speed of light"
    parser = verbs.add_parser("bench", help=line, description=line)
    parser.add_argument("op", metavar="OP", help="an operation of phalanx kernels list")
    parser.add_argument(
        "--shape",
        metavar="SIZES",
        action="append",
        default=[],
        help="sizes such as tokens=4096,width=2048; may be repeated (default: one of a real model that fits)",
    )
    parser.add_argument("--dtype", metavar="TYPE", help="bfloat16, float32, … (default: the operation's first)")
    _add_device(parser)
    parser.add_argument("--compile", action=OnOff, default=True, help="measure torch.compile too (default: on)")
    parser.add_argument("--out", metavar="DIR", help="write a dated JSON file and a roofline picture there")
    add_json(parser)


def _configure_verify(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `phalanx kernels verify` and its options."""
    line = "judge a kernel's file by its values, gradients and time, in a process of its own"
    parser = verbs.add_parser("verify", help=line, description=line)
    parser.add_argument("file", metavar="FILE", help='a Python file with OP = "…" and def kernel(*inputs)')
    parser.add_argument("--op", metavar="OP", help="the operation, where the file does not say OP")
    _add_device(parser)
    parser.add_argument("--shape", metavar="SIZES", help="time it at these sizes, such as tokens=4096,width=2048")
    parser.add_argument("--gradients", action=OnOff, default=True, help="ask for gradients too (default: on)")
    parser.add_argument("--time", action=OnOff, default=True, help="time it too (default: on)")
    parser.add_argument(
        "--time-limit", metavar="S", type=float, default=60.0, help="seconds until it is ended (default: 60)"
    )
    parser.add_argument("--allow-code", action="store_true", help="run the file: it is somebody's program")
    add_json(parser)


def _configure_skill_eval(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `phalanx kernels skill-eval` and its options."""
    line = "measure how many kernels of a language model pass the guard, with our skill and without"
    parser = verbs.add_parser("skill-eval", help=line, description=line)
    parser.add_argument("--proposer", metavar="CMD", help="a command: prompt on its stdin, answer on its stdout")
    parser.add_argument(
        "--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1"
    )
    parser.add_argument("--model", metavar="NAME", default="", help="the model of the endpoint")
    parser.add_argument("--replay", metavar="FILE", help="answers of a transcript instead")
    parser.add_argument("--record", metavar="FILE", help="write the transcript")
    parser.add_argument(
        "--op", metavar="OP", action="append", default=[], help="only this operation; may be repeated (default: all)"
    )
    parser.add_argument(
        "--runs", metavar="N", type=int, default=1, help="answers per operation and prompt (default: 1)"
    )
    _add_device(parser)
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=300.0, help="seconds for one answer (default: 300)"
    )
    parser.add_argument("--allow-code", action="store_true", help="run what the proposer writes")
    add_json(parser)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: cuda where there is one)")


def run_command(args: argparse.Namespace) -> int:
    """Run the sub-command and print its result."""
    if args.what == "list":
        return show(phalanx.kernels.operations(), as_json=args.json)
    if args.what == "new":
        return show(phalanx.kernels.new(args.op, args.out), as_json=args.json)
    if args.what == "bench":
        return _run_bench(args)
    if args.what == "verify":
        verdict = phalanx.kernels.verify(
            args.file,
            op=args.op,
            device=args.device,
            shape=args.shape,
            gradients=args.gradients,
            timed=args.time,
            time_limit_s=args.time_limit,
            allow_code=args.allow_code,
        )
        return show(verdict, as_json=args.json)
    lift = phalanx.kernels.skill_eval(
        proposer=args.proposer,
        endpoint=args.endpoint,
        model=args.model,
        replay=args.replay,
        record=args.record,
        ops=args.op,
        runs=args.runs,
        device=args.device,
        timeout_s=args.timeout,
        allow_code=args.allow_code,
        progress=note,
    )
    return show(lift, as_json=args.json)


def _run_bench(args: argparse.Namespace) -> int:
    measurements = phalanx.kernels.bench(
        args.op, shapes=args.shape, dtype=args.dtype, device=args.device, compiled=args.compile, progress=note
    )
    if args.out:
        note(f"wrote {', '.join(measurements.write(args.out))} to {args.out}")
    return show(measurements, as_json=args.json)
