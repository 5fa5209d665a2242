"""Traffic on a fabric, intact or with failed parts, by the fluid or the packet engine; comparisons of recovery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api import traffic_text as text
from phalanx.api.fabric_inputs import FabricTraffic, load_fabric, load_matrix, load_traffic, says_bytes
from phalanx.api.results import INTERRUPTED, PublicResult, Tell, teller
from phalanx.errors import mistake
from phalanx.io.codec import json_values
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.sim.compare_recovery import RecoveryQuestion, RecoveryRun
    from phalanx.sim.fabric_failures import FabricBreak, Scenario

TRANSPORTS = ("mrc", "ecmp", "roce", "htsim")
ENGINES = ("fluid", "packets")
CPU_S = 600.0
ANNOUNCED_S = 10.0  # a longer simulation is announced


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficCall:
    """The arguments of a `simulate` call."""

    fabric: str
    engine: str
    cm: str | None
    traffic: str | None
    nbytes: str | None
    seed: int
    routing: str | None
    paths: int | None
    fail: tuple[str, ...]
    left: float
    loss: float | None
    deny: tuple[str, ...]
    recovery: str | None
    converge: float | None
    compare: bool
    scenario: str | None
    wire: str | None
    transport: str | None
    pfc: bool | None
    dcqcn: bool | None
    each_plane: bool
    cpu: float | None
    tell: Tell


# ---- simulate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrafficSimulation(PublicResult):
    """The rates and completion times of the flows on a fabric; one dict per way of sending, by scenario."""

    page: str
    values: dict[str, Any]
    interrupted: bool

    def __str__(self) -> str:
        return self.page

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return self.values

    @property
    def exit_code(self) -> int:
        """130 if Ctrl-C left something out."""
        return INTERRUPTED if self.interrupted else 0


def simulate(
    fabric: str | Path,
    *,
    traffic: str | None = None,
    nbytes: str | int | None = None,
    cm: str | Path | None = None,
    engine: str = ENGINES[0],
    seed: int = 0,
    routing: str | None = None,
    paths: int | None = None,
    fail: Sequence[str] = (),
    left: float = 0.0,
    loss: float | None = None,
    deny: Sequence[str] = (),
    recovery: str | None = None,
    converge: float | None = None,
    compare: bool = False,
    scenario: str | None = None,
    wire: str | None = None,
    transport: str | None = None,
    pfc: bool | None = None,
    dcqcn: bool | None = None,
    each_plane: bool = False,
    cpu: float | None = None,
    progress: bool | Tell = False,
) -> TrafficSimulation:
    """Send traffic over a fabric, intact or with failed parts, by fair rates (fluid) or packet by packet.

    `traffic` is permutation, incast, ring, …, a CSV matrix or a job (`JOB.toml:AXIS`); `fail` are parts such as
    "link:0/3/5" or "t1:0/2@50us..2ms". `compare` compares a conventional fabric with recovery at the edge, `scenario`
    does so for a named failure or for "all". `cpu` bounds the CPU seconds (600).

    >>> simulate("clos2:16x400G/2p/8", traffic="ring", nbytes="1M")
    <TrafficSimulation: clos2:16x400G/2p/8: ring, 16 flows of 1.00 MB, 16.0 MB in all>
    """
    tell = teller(progress)
    call = TrafficCall(
        fabric=str(fabric),
        engine=engine,
        cm=str(cm) if cm is not None else None,
        traffic=traffic,
        nbytes=str(nbytes) if nbytes is not None else None,
        seed=seed,
        routing=routing,
        paths=paths,
        fail=tuple(fail),
        left=left,
        loss=loss,
        deny=tuple(deny),
        recovery=recovery,
        converge=converge,
        compare=compare,
        scenario=scenario,
        wire=wire,
        transport=transport,
        pfc=pfc,
        dcqcn=dcqcn,
        each_plane=each_plane,
        cpu=cpu,
        tell=tell,
    )
    _check_call(call)
    loaded_fabric, not_mapped = load_fabric(call.fabric)
    # A fabric with more links than an engine can hold is refused before any traffic is made for it; the packet engine
    # simulates identical planes once.
    from phalanx.sim.fabric_links import links_of

    links_of(loaded_fabric if engine == "fluid" else replace(loaded_fabric, planes=1, nic_gbps=loaded_fabric.port_gbps))
    if compare or scenario is not None:
        call = _with_usual_bytes(call, loaded_fabric)
    if scenario is not None:
        return _simulate_scenarios(call, loaded_fabric)
    # The fluid engine and comparisons have no start times.
    if call.cm:
        sent = load_matrix(Path(call.cm), loaded_fabric, timed=engine == "packets" and not compare)
    else:
        sent = load_traffic(call.traffic, call.nbytes, seed, loaded_fabric, tell)
    sent = replace(sent, not_mapped=not_mapped + sent.not_mapped)
    if compare:
        return _simulate_comparison(call, loaded_fabric, sent)
    return (
        _simulate_fluid(call, loaded_fabric, sent)
        if engine == "fluid"
        else _simulate_packets(call, loaded_fabric, sent)
    )


def _with_usual_bytes(call: TrafficCall, fabric: Fabric) -> TrafficCall:
    """Set enough traffic that it lasts until the failure, unless the user states an amount."""
    from phalanx.sim.fabric_failures import usual_bytes

    if call.cm or says_bytes(call.traffic or "") or call.nbytes is not None:
        return call
    return replace(call, nbytes=f"{usual_bytes(fabric):.0f}")


def _check_call(call: TrafficCall) -> None:
    """Raise UserError for options that would have no effect, or are out of range."""
    from phalanx.sim.fabric_failures import FabricBreak, faults_of

    for name in TrafficCall.__dataclass_fields__:
        value = getattr(call, name)
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise mistake(f"--{'bytes' if name == 'nbytes' else name}", "is empty", fix="leave it out, or say which")
    if call.cm and (call.traffic or call.nbytes):
        raise mistake("--cm", "the file already says who sends how much", fix="leave out --traffic and --bytes")
    if not call.cm:  # the .cm file may name failed parts too
        faults_of(FabricBreak(failed=call.fail, left=call.left, loss=call.loss or 0.0))
    if call.engine == "fluid":
        for option, value in {"--transport": call.transport, "--dcqcn": call.dcqcn}.items():
            if value is not None:
                raise mistake(option, "the fluid engine has no packets", fix="add --engine packets")
        if call.each_plane:
            raise mistake("--each-plane", "the fluid engine has all planes anyway", fix="leave it out")
    elif call.wire is not None:
        raise mistake("--wire", "packets have the headers of their transport", fix="use --transport mrc or htsim")
    chosen = {
        "--transport": call.transport,
        "--routing": call.routing,
        "--recovery": call.recovery,
        "--wire": call.wire,
        "--pfc": call.pfc,
        "--dcqcn": call.dcqcn,
    }
    for option, value in chosen.items():
        if (call.compare or call.scenario) and value not in (None, ""):
            raise mistake(option, "--compare and --scenario choose it for all columns", fix="leave one of the two out")
    if call.each_plane and (call.compare or call.scenario):
        raise mistake("--each-plane", "--compare and --scenario do what a failure needs", fix="leave it out")
    scenario_options = {
        "--fail": call.fail,
        "--left": call.left,
        "--loss": call.loss,
        "--cm": call.cm,
        "--traffic": call.traffic,
    }
    for option, value in scenario_options.items():
        if call.scenario and value:
            raise mistake(option, "--scenario says what fails under which traffic", fix="use --compare for your own")
    if call.paths is not None and call.paths < 1:
        raise mistake("--paths", f"{plural(call.paths, 'path')} per flow", fix="use 1 or more, or leave it out")
    if call.cpu is not None and not 0 < call.cpu < 1e9:
        raise mistake("--cpu", f"{call.cpu:g} seconds", fix="use 60, or 600")


def _broken_by(call: TrafficCall, traffic: FabricTraffic) -> FabricBreak:
    """Return the failures named in the call and in a file of connections."""
    from phalanx.sim.fabric_failures import FabricBreak

    return FabricBreak(failed=(*call.fail, *traffic.failed), left=call.left, loss=call.loss or 0.0, denied=call.deny)


def _simulate_fluid(call: TrafficCall, fabric: Fabric, traffic: FabricTraffic) -> TrafficSimulation:
    """Simulate constant rates with failures from the start, or rates over time if something fails on the way."""
    from phalanx.sim.compare_recovery import effects_left_out, one_fluid_run
    from phalanx.sim.packets.simulation_arrays import PacketBudget
    from phalanx.sim.simulate import WIRES, check_choice
    from phalanx.sim.simulate import simulate as settle

    not_mapped = traffic.not_mapped
    if call.fabric.strip().lower().endswith(".topo"):
        not_mapped += ("latencies: the fluid engine takes them from --wire",)
    in_time = bool(
        call.loss or call.converge is not None or call.pfc or any("@" in failed_part for failed_part in call.fail)
    )
    result: dict[str, Any]
    if in_time:
        result = one_fluid_run(
            _recovery_question(call, fabric, traffic),
            spread=call.routing or "adaptive",
            recovery=call.recovery or "",
            converges=call.converge is not None,
            pauses=bool(call.pfc),
            wire=WIRES[check_choice("--wire", call.wire or "mrc", tuple(WIRES))],
        )
    else:
        result = settle(
            fabric,
            traffic.name,
            flows=traffic.flows,
            spread=call.routing or "all",
            paths=call.paths or 0,
            failed=(*call.fail, *traffic.failed),
            left=call.left,
            denied=list(call.deny),
            recovery=call.recovery or "",
            wire=call.wire or "mrc",
            seed=call.seed,
            watched=traffic.watched,
            budget=PacketBudget(cpu_s=call.cpu or CPU_S),
        )
    _tell_beside(result, call.tell)
    notes = effects_left_out(_broken_by(call, traffic), [result]) if in_time else ()
    page = text.columns_text([result]) if in_time else text.settled_text(result)
    return _one_simulation(result, page, traffic, notes, not_mapped, interrupted=bool(result["stopped"]))


def _simulate_packets(call: TrafficCall, fabric: Fabric, traffic: FabricTraffic) -> TrafficSimulation:
    from phalanx.sim.compare_recovery import effects_left_out
    from phalanx.sim.packets.simulation_arrays import PacketBudget
    from phalanx.sim.simulate import simulate_packets, transport_of

    result: dict[str, Any] = simulate_packets(
        fabric,
        traffic.name,
        traffic.flows,
        transport=transport_of(
            call.transport or "mrc",
            paths=call.paths or 0,
            converge_s=call.converge,
            routing=call.routing or "",
            recovery=call.recovery or "",
            pfc=call.pfc,
            dcqcn=call.dcqcn,
        ),
        broken=_broken_by(call, traffic),
        seed=call.seed,
        budget=PacketBudget(cpu_s=call.cpu or CPU_S),
        schedule=traffic.schedule,
        each_plane=call.each_plane,
    )
    _tell_beside(result, call.tell)
    notes = effects_left_out(_broken_by(call, traffic), [result])
    interrupted = result["stopped"] == "interrupted"
    page = text.packet_text(result)
    return _one_simulation(result, page, traffic, notes, traffic.not_mapped, interrupted=interrupted)


def _one_simulation(
    found: dict[str, Any],
    page: str,
    traffic: FabricTraffic,
    notes: Sequence[str],
    said: Sequence[str],
    *,
    interrupted: bool,
) -> TrafficSimulation:
    lines = [page, *text.incast_text(traffic), *text.notes_text(notes), *text.not_mapped_text(said)]
    values = {**found, "notes": notes, "not_mapped": said}
    return TrafficSimulation(page="\n".join(lines), values=json_values(values), interrupted=interrupted)


# ---- compare ---------------------------------------------------------------------------------------------------------


def _simulate_comparison(call: TrafficCall, fabric: Fabric, traffic: FabricTraffic) -> TrafficSimulation:
    """Simulate one failure, with a column for each way of sending."""
    from phalanx.sim.compare_recovery import effects_left_out

    question = _recovery_question(call, fabric, traffic)
    _announce_time([question], call)
    columns, interrupted = _compared_columns(question, call, [])
    notes = effects_left_out(question.broken, columns)
    lines = [
        text.columns_text(columns),
        *text.incast_text(traffic),
        *text.notes_text(notes),
        *text.not_mapped_text(traffic.not_mapped),
        text.job_hint(call.fabric, question.broken.failed, loss=question.broken.loss > 0),
    ]
    values = {"compare": columns, "notes": notes, "not_mapped": traffic.not_mapped}
    return TrafficSimulation(page="\n".join(lines), values=json_values(values), interrupted=interrupted)


def _simulate_scenarios(call: TrafficCall, fabric: Fabric) -> TrafficSimulation:
    """Simulate named failures: one as a table, several as a line each."""
    from phalanx.sim.compare_recovery import effects_left_out
    from phalanx.sim.fabric_failures import chosen_scenarios

    scenarios = chosen_scenarios(str(call.scenario), fabric)
    done: dict[str, list[dict[str, Any]]] = {}
    # Runs without failure of the traffic that all scenarios but the incast share.
    intact_runs: list[RecoveryRun] = []
    interrupted = False
    questions = [_scenario_question(call, fabric, scenario) for scenario in scenarios]
    _announce_time(questions, call)
    for scenario, question in zip(scenarios, questions, strict=True):
        if len(scenarios) > 1:
            call.tell(f"{scenario.name}: {scenario.what}")
        done[scenario.name], interrupted = _compared_columns(question, call, [] if scenario.incast else intact_runs)
        if interrupted:
            break
    notes = tuple(
        dict.fromkeys(
            line for scenario in scenarios for line in effects_left_out(scenario.broken, done.get(scenario.name, ()))
        )
    )
    values = {"scenarios": [{"scenario": name, "compare": columns} for name, columns in done.items()], "notes": notes}
    if len(scenarios) == 1:
        scenario = scenarios[0]
        incast = text.incast_text(FabricTraffic(name="", flows=questions[0].flows, watched=questions[0].watched))
        hint = text.job_hint(call.fabric, scenario.broken.failed, loss=scenario.broken.loss > 0)
        head = [
            f"{scenario.name}: {scenario.what}",
            text.columns_text(done[scenario.name]),
            *incast,
        ]
    else:
        hint = f"  step time of a job: phalanx sim JOB --fabric {call.fabric} --break t1"
        head = [text.lines_text(done)]
    page = "\n".join([*head, *text.notes_text(notes), hint])
    return TrafficSimulation(page=page, values=json_values(values), interrupted=interrupted)


def _recovery_question(call: TrafficCall, fabric: Fabric, traffic: FabricTraffic) -> RecoveryQuestion:
    """Return the question of a comparison from the call."""
    from phalanx.network.fabric.failure_budget import CONVERGE_S
    from phalanx.sim import compare_recovery as compare
    from phalanx.sim.packets.simulation_arrays import PacketBudget
    from phalanx.sim.simulate import SHORT_CONVERGE_S

    usual_s = CONVERGE_S if call.engine == "fluid" else SHORT_CONVERGE_S
    return compare.RecoveryQuestion(
        fabric=fabric,
        flows=traffic.flows,
        traffic=traffic.name,
        broken=_broken_by(call, traffic),
        paths=call.paths or 0,
        converge_s=compare.checked_converge_s(call.converge, usual_s),
        watched=traffic.watched,
        seed=call.seed,
        budget=PacketBudget(cpu_s=call.cpu or CPU_S),
    )


def _scenario_question(call: TrafficCall, fabric: Fabric, one: Scenario) -> RecoveryQuestion:
    from phalanx.sim.traffic_matrix import INCAST

    call = replace(call, traffic=INCAST if one.incast else None)
    sent = load_traffic(call.traffic, call.nbytes, call.seed, fabric, call.tell)
    base_question = _recovery_question(call, fabric, sent)
    return replace(base_question, broken=replace(one.broken, denied=base_question.broken.denied))


def _compared_columns(
    question: RecoveryQuestion, call: TrafficCall, kept: list[RecoveryRun]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the results of each way of sending up to Ctrl-C, and True if Ctrl-C came."""
    from phalanx.sim.compare_recovery import compare_recoveries, fluid_runs, packet_runs

    columns: list[dict[str, Any]] = []
    rows: Iterator[dict[str, Any]] = compare_recoveries(
        question, fluid_runs if call.engine == "fluid" else packet_runs, kept
    )
    try:
        for column in rows:
            columns.append(column)
            _tell_beside(column, call.tell)
    except KeyboardInterrupt:
        if not columns:
            raise
        return columns, True
    return columns, columns[-1]["stopped"] == "interrupted"


def _announce_time(questions: Sequence[RecoveryQuestion], call: TrafficCall) -> None:
    """Announce the duration if it is long; raise UserError if it exceeds the budget."""
    from phalanx.sim.compare_recovery import fluid_cpu_s, packet_cpu_s, whole_of

    expected = fluid_cpu_s if call.engine == "fluid" else packet_cpu_s
    cpu_s, seen_traffic = 0.0, set()
    for entry in questions:
        cpu_s += expected(entry)
        # The same traffic without failure runs once.
        if entry.traffic in seen_traffic and entry.broken.failed:
            cpu_s -= expected(whole_of(entry))
        seen_traffic.add(entry.traffic)
    question = questions[0]
    cases = f" and {len(questions)} scenarios" if len(questions) > 1 else ""
    if cpu_s > question.budget.cpu_s:
        raise mistake(
            f"{call.engine} on {question.fabric.name}",
            f"{len(question.flows):,} flows in three ways of sending{cases} need about {cpu_s:,.0f} s of CPU; the "
            f"budget is {question.budget.cpu_s:,.3g} s",
            fix="raise --cpu, or simulate fewer hosts"
            + (", or one scenario" if cases else "")
            + (", or send fewer --bytes, shorten --converge, or use --engine fluid" * (call.engine == "packets")),
        )
    if cpu_s > ANNOUNCED_S:
        call.tell(f"{len(question.flows):,} flows in three ways of sending{cases}: about {cpu_s:,.0f} s of CPU")


def _tell_beside(one: dict[str, Any], tell: Tell) -> None:
    """Print what a reader must know in addition to the numbers."""
    for part in one.get("failed_too_late", ()):
        over_s = one.get("simulated_s", one["tail_s"])
        tell(f"{one['transport']}: {part} had no effect: all was over after {format_seconds(over_s)}")
    if one["stopped"]:
        tell(f"stopped ({one['stopped']}): {one['finished_flows']:,} of {one['flows']:,} flows are finished")
