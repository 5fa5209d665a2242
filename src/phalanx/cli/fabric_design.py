"""`phalanx fabric design`: every fabric that joins N GPUs or a job's cluster, which to take, and as a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.fabric_plain import fabric_plain, gpus_of, page_width, value_plain
from phalanx.cli.options import add_json, add_set
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake

if TYPE_CHECKING:
    from phalanx.cli.fabric_job import JobSteps
    from phalanx.network.fabric.design import Design, DesignRequest
    from phalanx.network.fabric.fabric_types import Switch
    from phalanx.network.fabric.verdict import DesignVerdict, Prices

WHERE = "phalanx fabric design"
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx fabric design`."""
    parser.add_argument("--gpus", metavar="N", help="GPUs to join, one NIC each, as 131072 or 64k")
    parser.add_argument("--nic-gbps", metavar="G", type=float, help="speed of a NIC, as 400 or 800")
    parser.add_argument("--switch", metavar="NAME", help='a box, a configuration or ports, as "Tomahawk 5", 512x100G')
    parser.add_argument("--tiers", metavar="L", type=int, help="exactly this many tiers (the fewest that reach)")
    parser.add_argument("--planes", metavar="P", type=int, help="exactly this many planes (all the switch can do)")
    parser.add_argument("--oversubscription", metavar="R", type=float, help="ports down per port up at T0 (1, 2 and 4)")
    parser.add_argument("--rails", metavar="K", type=int, help="NICs of a server on different T0s (none and 8)")
    parser.add_argument("--catalogue", metavar="FILE.csv", help="choose among these switches instead of the shipped")
    parser.add_argument("--top", metavar="N", type=int, default=6, help="shown of each oversubscription (6)")
    job = parser.add_argument_group("for a job")
    job.add_argument("--job", metavar="JOB", help="GPUs and NIC of its cluster; its step on the best designs")
    job.add_argument("--cluster", metavar="SPEC", help="on this cluster instead of the job's, as 8xH100:16")
    add_set(parser)
    money = parser.add_argument_group("the choice")
    money.add_argument("--gpu-hour-usd", metavar="X", type=float, help="an hour of a GPU (the job's price, or 3.25)")
    money.add_argument("--kwh-usd", metavar="X", type=float, help="electricity (0.08)")
    money.add_argument("--years", metavar="X", type=float, help="life of the fabric (4)")
    money.add_argument("--recovery-s", metavar="S", type=float, help="from failure to bypass (30e-6)")
    files = parser.add_argument_group("files")
    files.add_argument("--save", metavar="FILE.toml", help="write the pick; fabric show, simulate and sim read it")
    files.add_argument("--csv", metavar="FILE.csv", help="write every design as a line")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Find, choose, tell, and write what was asked for."""
    from phalanx.network.fabric.design import design_fabrics

    if args.top < 1:
        raise mistake(WHERE, f"--top {args.top} shows nothing", fix="use 1 or more")
    catalogue = _catalogue(args.catalogue)
    if args.job is None:
        found = design_fabrics(_wish(args, catalogue))
        chosen, steps = _choose(found, args), None
    else:
        found, chosen, steps = _for_job(args, catalogue)
    _write(found, chosen, args)
    _tell(found, chosen, steps, args)
    return INTERRUPTED if steps is not None and steps.interrupted else 0


def _catalogue(name: str | None) -> tuple[Switch, ...]:
    if name is None:
        return ()
    from phalanx.network.fabric.switch_catalogue import read_catalogue

    return read_catalogue(Path(name))


def _wish(
    args: argparse.Namespace, catalogue: tuple[Switch, ...], *, gpus: int = 0, nic_gbps: float = 0.0
) -> DesignRequest:
    from phalanx.network.fabric.design import DesignRequest

    for option, given, known in (("--gpus", args.gpus, gpus), ("--nic-gbps", args.nic_gbps, nic_gbps)):
        if given is None and not known:
            fix = f"give {option}, as --gpus 131072 --nic-gbps 800, or --job JOB, whose cluster says it"
            raise mistake(WHERE, f"{option} is missing", fix=fix)
    return DesignRequest(
        gpus=gpus_of(args.gpus, WHERE) if args.gpus is not None else gpus,
        nic_gbps=args.nic_gbps if args.nic_gbps is not None else nic_gbps,
        switch=args.switch,
        tiers=args.tiers,
        planes=args.planes,
        oversubscription=args.oversubscription,
        rails=args.rails,
        catalogue=catalogue,
    )


def _prices(args: argparse.Namespace, gpu_hour_usd: float | None = None, waits: float | None = None) -> Prices:
    from phalanx.network.fabric.verdict import Prices, check_prices

    given = {
        "gpu_hour_usd": args.gpu_hour_usd if args.gpu_hour_usd is not None else gpu_hour_usd,
        "kwh_usd": args.kwh_usd,
        "years": args.years,
        "recovery_s": args.recovery_s,
        "waits": waits,
    }
    prices = Prices(**{name: value for name, value in given.items() if value is not None})
    check_prices(prices, where=WHERE)
    return prices


def _choose(found: tuple[Design, ...], args: argparse.Namespace) -> DesignVerdict | None:
    from phalanx.network.fabric.verdict import choose_design

    return choose_design(found, _prices(args))


def _for_job(
    args: argparse.Namespace, catalogue: tuple[Switch, ...]
) -> tuple[tuple[Design, ...], DesignVerdict | None, JobSteps]:
    from phalanx.cli.fabric_job import job_plan, job_steps
    from phalanx.network.fabric.design import design_fabrics
    from phalanx.network.fabric.verdict import choose_design
    from phalanx.sim.months.causes import network_share

    plan = job_plan(args.job, args.overrides, args.cluster)
    cluster = plan.cluster
    wish = _wish(args, catalogue, gpus=cluster.devices, nic_gbps=round(cluster.nic_bytes_per_s * 8 / 1e9, 6))
    if wish.gpus < plan.layout.devices:
        what = f"{wish.gpus:,} GPUs, but the job runs on {plan.layout.devices:,}"
        raise mistake(WHERE, what, fix="leave out --gpus, or name a smaller --cluster")
    usd = plan.bill.usd_per_device_hour[1] if plan.bill.usd_per_device_hour else None
    prices = _prices(args, usd, waits=network_share(plan))
    found = design_fabrics(wish)
    steps = job_steps(plan, found, prices)
    return found, choose_design(found, prices, steps_s=steps.steps_s), steps


def _write(found: tuple[Design, ...], chosen: DesignVerdict | None, args: argparse.Namespace) -> None:
    from phalanx.io.files import write_text
    from phalanx.network.fabric.design import designs_csv, fabric_toml

    if args.csv:
        write_text(Path(args.csv), designs_csv(found), fix="name another --csv")
        note(f"wrote {args.csv}: {len(found)} designs")
    if args.save:
        pick = chosen.pick.design if chosen is not None else found[0]
        write_text(Path(args.save), fabric_toml(pick.fabric), fix="name another --save")
        note(f"wrote {args.save}: {pick.fabric.name}")


def _tell(
    found: tuple[Design, ...], chosen: DesignVerdict | None, steps: JobSteps | None, args: argparse.Namespace
) -> None:
    from phalanx.network.fabric.fabric_text import folded, show_designs
    from phalanx.network.fabric.verdict import show_verdict

    if args.json:
        made = [{**value_plain(one), "fabric": fabric_plain(one.fabric)} for one in found]
        said = show_verdict(chosen) if chosen is not None else None
        print_json({"verdict": chosen, "verdict_text": said, "job": _job(steps), "designs": made})
        return
    width = page_width()
    if chosen is not None:
        say(show_verdict(chosen, width=width) + "\n")
    if steps is not None:
        say(folded(steps.text(), width) + "\n")
    say(show_designs(found, top=args.top, width=width))


def _job(steps: JobSteps | None) -> dict[str, object] | None:
    return None if steps is None else {"job": steps.job, "layout": steps.layout, "steps": steps.rows}
