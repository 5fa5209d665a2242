"""Transports of the packet engine by their words."""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.errors import mistake
from phalanx.network.fabric.types import Fabric
from phalanx.sim.packets.roce import ROCE, ROCE_LOSSY, Dcqcn, Roce
from phalanx.sim.packets.transport import ECMP, HTSIM, MRC, Transport
from phalanx.sim.simulate import MOST_CONVERGE_S, RECOVERIES, ROUTINGS, choice

AnyTransport = Transport | Roce
TRANSPORTS: dict[str, AnyTransport] = {"mrc": MRC, "ecmp": ECMP, "roce": ROCE, "htsim": HTSIM}
# A second of a small fabric is a minute of CPU, because every slot costs. Ten milliseconds show the same stall; each
# second more of convergence (`network.fabric.recovery.CONVERGE_S` is ten) is a second more of it.
SHORT_CONVERGE_S = 0.01
QPS = 8  # "little gain past 8 QPs" (arXiv:2605.04333 section 5.2.7)


def transport_of(
    name: str = "mrc",
    *,
    routing: str = "",
    paths: int = 0,
    recovery: str = "",
    converge_s: float | None = None,
    pfc: bool | None = None,
    dcqcn: bool | None = None,
) -> AnyTransport:
    """A transport by its words; empty ones are its own settings."""
    made = TRANSPORTS[choice("--transport", name, tuple(TRANSPORTS))]
    if routing == "flow" and paths > 1:
        raise mistake("--paths", f"{paths} paths, but --routing flow is one", fix="use --routing qp")
    if isinstance(made, Roce):
        made = _roce(made, routing, paths, pfc, dcqcn)
    elif pfc is not None or dcqcn is not None:
        option, what = ("--pfc", "drops and trims packets") if pfc is not None else ("--dcqcn", "has a window")
        raise mistake(option, f"{made.name} {what}", fix="add --transport roce")
    else:
        made = _spread(made, routing)
        made = replace(made, paths=paths) if paths else made
    return _converging(_recovering(made, recovery, converge_s), converge_s)


def compared(fabric: Fabric, *, paths: int = 0, converge_s: float = SHORT_CONVERGE_S) -> tuple[Roce, Roce, Transport]:
    """RoCE without and with PFC, a queue pair on each plane and routing that converges, and recovery at the edge.

    One path in all could use one plane only, and the difference would be that of planes, not of recovery.
    """
    lossy = replace(ROCE_LOSSY, name="RoCE, PFC off", qps=fabric.planes, converge_s=converge_s)
    lossless = replace(ROCE, name="RoCE, PFC on", qps=fabric.planes, converge_s=converge_s)
    return lossy, lossless, replace(MRC, name="MRC, edge", paths=paths or MRC.paths)


def paths_of(transport: AnyTransport) -> int:
    """Per connection."""
    return transport.qps if isinstance(transport, Roce) else transport.paths


def spread_of(transport: AnyTransport) -> str:
    """How packets are spread over paths."""
    return "qp" if isinstance(transport, Roce) else transport.spray


def recovery_of(transport: AnyTransport) -> str:
    """Who leaves dead paths, in the words of the fluid engine."""
    if not isinstance(transport, Roce) and transport.recovery == "edge":
        return "edge"
    return "conventional" if math.isfinite(transport.converge_s) else "none"


def converge_of(transport: AnyTransport) -> float | None:
    """Seconds until routing knows; None where nobody waits for it."""
    return transport.converge_s if recovery_of(transport) == "conventional" else None


def _roce(made: Roce, routing: str, paths: int, pfc: bool | None, dcqcn: bool | None) -> Roce:
    if routing not in ("", "flow", "qp"):
        choice("--routing", routing, ROUTINGS)
        raise mistake("--routing", f"RoCE does not send by {routing}: a queue pair has one path", fix="use flow or qp")
    qps = paths or (1 if routing == "flow" else QPS if routing == "qp" else made.qps)
    rate = made.dcqcn if dcqcn is None else Dcqcn() if dcqcn else None
    paused = made.pfc if pfc is None else pfc
    parts = [word for word, on in (("PFC", paused), ("DCQCN", rate is not None)) if on]
    name = f"RoCE, {' and '.join(parts)}" if parts else "RoCE"
    return replace(made, name=name, qps=qps, pfc=paused, dcqcn=rate)


def _spread(transport: Transport, routing: str) -> Transport:
    """A routing of the fluid engine as paths and spraying: `qp` is here 8 paths taken in turn."""
    if not routing:
        return transport
    word = choice("--routing", routing, ROUTINGS)
    if word == "flow":
        return replace(transport, paths=1, spray="oblivious")
    if word == "qp":
        return replace(transport, paths=QPS, spray="oblivious")
    if word == "oblivious":
        return replace(transport, spray="oblivious")
    if word == "adaptive":
        return replace(transport, spray="skip" if transport.spray == "oblivious" else transport.spray)
    raise mistake(
        "--routing all",
        "every path at once is an idea of the fluid engine: packets take one path each",
        fix="use --routing adaptive with --paths 256",
    )


def _recovering(made: AnyTransport, recovery: str, converge_s: float | None) -> AnyTransport:
    if not recovery:
        return made
    chosen = choice("--recovery", recovery, RECOVERIES)
    if isinstance(made, Roce):
        if chosen == "edge":
            what = "a queue pair of RoCE has one path and cannot leave it"
            raise mistake("--recovery", what, fix="use --recovery conventional, or --transport mrc")
    else:
        made = replace(made, recovery="edge" if chosen == "edge" else "routing")
    if chosen == "none":
        if converge_s is not None:
            raise mistake("--converge", "nothing converges with --recovery none", fix="leave one of them out")
        return replace(made, converge_s=math.inf)
    return made


def _converging(made: AnyTransport, converge_s: float | None) -> AnyTransport:
    if converge_s is None:
        return replace(made, converge_s=SHORT_CONVERGE_S) if recovery_of(made) == "conventional" else made
    if recovery_of(made) == "edge":
        raise mistake("--converge", "recovery at the edge waits for no routing", fix="add --recovery conventional")
    if not 0 < converge_s <= MOST_CONVERGE_S:
        raise mistake("--converge", f"{converge_s:g} seconds", fix="use 1, or 0.1")
    return replace(made, converge_s=converge_s)
