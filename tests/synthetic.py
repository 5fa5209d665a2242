"""A plausible run folder without a run: every file and every kind of event, for tests of whoever reads them.

`from synthetic import write_run`. Loss falls, one rank dies where asked, work is undone and done again, and all times
add up: the ledger of such a run closes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.plan.plan import Plan
from phalanx.record.run import Run

BEGAN_S = 1_794_700_000.0
TOKENS = 64 * 4096  # of a step
STEP_S = 6.65  # as the plan predicts
EVALUATE_EVERY, SAVE_EVERY, TIMELINE_EVERY = 40, 50, 50  # steps
MONITOR_S, PEERS_S = 10.0, 30.0
LOST = 3  # steps that an incident undoes
GiB = 2.0**30


def write_run(
    folder: Path,
    *,
    name: str = "run",
    ranks: int = 4,
    steps: int = 200,
    incidents: int = 1,
    seed: int = 0,
    finished: bool = True,
    monitor: bool = True,
    hosts: int = 2,
    straggler: int | None = None,
) -> Run:
    """Write `folder/name`: `ranks` on `hosts`, `steps` done in all; `straggler` computes half as long again."""
    run = Run(path=folder / name)
    for inner in ("logs", "errors", "checkpoints"):
        (run.path / inner).mkdir(parents=True)
    plan = make_plan(ranks=ranks, steps=steps if finished else 2 * steps, hosts=hosts)
    (run.path / "job.json").write_text(json.dumps(plan["job"]))
    run.job_toml.write_text(to_toml(job_to_dict(Plan.from_dict(plan).job)))
    run.plan_json.write_text(json.dumps(plan))
    layout = f"TP{plan['layout']['tensor']}·CP1·PP1·DP{plan['layout']['data']} (ZeRO-3, EP1) mbs2 no-recompute"
    names = [f"host-{number}" for number in range(hosts)]
    slots = [sum(_host(rank, ranks, hosts) == one for rank in range(ranks)) for one in names]
    run.set_launch(v=1, world=ranks, layout=layout, started=BEGAN_S, data_s=0.5, hosts=names, slots=slots,
                   launched=BEGAN_S + 0.8, allow_code=False, baselines={"unigram_bits_per_byte": 4.1})  # fmt: skip
    script = _Script(plan=plan, ranks=ranks, steps=steps, hosts=hosts, finished=finished)
    script.perform(incidents, np.random.default_rng(seed))
    _write_supervisor(run, script)
    for rank in range(ranks):
        _write_rank(run, rank, script, np.random.default_rng((seed, rank)), monitor=monitor, slow=rank == straggler)
        run.log(rank).write_text(f"rank {rank} of {ranks}\n")
    for step in script.saved[-3:]:
        (run.path / "checkpoints" / f"step-{step:08d}").mkdir()
        (run.path / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    state = {"state": "done", "exit_code": 0, "message": ""} if finished else {"state": "running"}
    (run.path / "status.json").write_text(json.dumps({"t": script.now, "step": steps, **state}))
    return run


def make_plan(*, ranks: int, steps: int, hosts: int) -> dict[str, Any]:
    """The plan of Llama 3 8B on H100s as `phalanx plan` made it for 2 data x 2 tensor ranks, stretched to `ranks`."""
    plan: dict[str, Any] = json.loads(Path(__file__).with_name("synthetic_plan.json").read_text())
    tensor = 2 if ranks % 2 == 0 else 1
    data = ranks // tensor
    plan["layout"] |= {"data": data, "shard": data, "tensor": tensor}
    plan["cluster"] |= {"name": f"{ranks // hosts or 1}xH100:{hosts}", "domains": hosts}
    plan["cluster"]["domain_devices"] = plan["cluster"]["host_devices"] = max(1, ranks // hosts)
    for axis, size in zip(plan["mapping"], (tensor, data), strict=True):
        axis["size"] = size
    plan["reliability"]["hosts"] = hosts
    plan["duration"] |= {"steps": steps, "tokens": steps * TOKENS, "training_s": steps * STEP_S}
    plan["duration"] |= {"wall_s": steps * STEP_S * 1.01, "wall_s_low": steps * 6.2, "wall_s_high": steps * 7.5}
    return plan


@dataclass(kw_only=True)
class _Script:
    """What all ranks live through together: (time, kind, fields) in order, the same for all of them."""

    plan: dict[str, Any]
    ranks: int
    steps: int
    hosts: int
    finished: bool
    now: float = BEGAN_S
    epoch: int = 0
    acts: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    supervisor: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    _pending: tuple[float, dict[str, Any]] | None = None

    def perform(self, incidents: int, rng: np.random.Generator) -> None:
        for host in range(self.hosts):
            self._tell("host", after=0.2, host=f"host-{host}", state="joined", problems=[])
        falls = {(number + 1) * self.steps // (incidents + 1) for number in range(incidents)}
        seconds = STEP_S * (1 + 0.01 * rng.standard_normal(self.steps)).clip(0.9, 1.2)
        step = self._form(0, "start", "start")
        while step < self.steps:
            if step in falls:
                falls.discard(step)
                step = self._fall(step)
            step = self._step(step, float(seconds[step]))
        if self.finished:
            self._save(step)
            self._commit()
            self._act("sample", 0.5, step=step, text="The ranks move in lockstep.")
            self._act("run_end", 0.0, step=step, state="done")
            self._tell("end", after=0.5, state="done", message="")

    def _tell(self, event: str, *, after: float = 0.0, rank: int = -1, **fields: Any) -> None:
        self.now += after
        line = {"v": 1, "event": event, "t": round(self.now, 6), "rank": rank, "epoch": self.epoch, **fields}
        self.supervisor.append(line)

    def _act(self, event: str, after: float, **fields: Any) -> None:
        self.now += after
        self.acts.append((self.now, event, fields))

    def _form(self, step: int, reason: str, source: str) -> int:
        self.epoch += 1
        members = [
            {"rank": rank, "host": _host(rank, self.ranks, self.hosts), "slot": rank, "pid": 1000 + rank}
            for rank in range(self.ranks)
        ]
        self._tell("epoch", after=1.0, reason=reason, world=self.ranks, layout=self.plan["layout"], members=members)
        self._tell("restore", after=0.5, step=step, source=source)
        self._act("ready", 6.0, epoch=self.epoch, step=step, source=source, seconds=6.0, warnings=[])
        planned = self.plan["duration"]["steps"]
        self._act("run_start", 0.01, step=step, steps=planned, world=self.ranks, epoch=self.epoch)
        return step

    def _fall(self, step: int) -> int:
        """A rank dies in the middle of a step; the last few are lost."""
        self._pending, fallen = None, self.ranks - 1
        host, back = _host(fallen, self.ranks, self.hosts), max(0, step - LOST)
        cause = {"kind": "Signal", "message": "", "signal": 9}
        self._tell("incident", after=5.0, rank=fallen, host=host, slot=fallen, step=step, cause=cause, stack="",
                   others=[], in_a_row=1, waited_s=0.4)  # fmt: skip
        self._tell("evidence", after=0.1, last_collectives={"0": "nccl:all_reduce number 7 of group data"})
        return self._form(back, f"rank {fallen} fell: Signal", "memory" if back else "start")

    def _step(self, step: int, seconds: float) -> int:
        first = self.acts[-1][1] == "run_start"
        compile_s = 12.0 if first and self.epoch == 1 else None
        seconds += compile_s or 0.0
        self._act("step", seconds, step=step, epoch=self.epoch, duration_s=seconds, compile_s=compile_s)
        if self._pending and self.now >= self._pending[0]:
            self._commit()
        if (step + 1) % EVALUATE_EVERY == 0 and step + 1 < self.steps:
            loss = _loss(step) + 0.02
            self._act("evaluate", 3.0, step=step + 1, loss=loss, bits_per_byte=loss / 2.9, tokens=65536, seconds=3.0)
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < self.steps:
            self._save(step + 1)
        return step + 1

    def _save(self, step: int) -> None:
        blocked = {"step": step, "epoch": self.epoch, "phase": "stage", "blocked_s": 1.6, "seconds": None}
        self._act("checkpoint", 1.6, **blocked, bytes=None)
        done = {"step": step, "epoch": self.epoch, "phase": "commit", "path": f"step-{step:08d}", "seconds": 9.5}
        self._pending = (self.now + 9.5, done | {"bytes": int(112e9 / self.ranks)})

    def _commit(self) -> None:
        if self._pending:
            self.acts.append((max(self.now, self._pending[0]), "checkpoint", self._pending[1]))
            self.now = self.acts[-1][0]
            self.saved.append(self._pending[1]["step"])
        self._pending = None


def _host(rank: int, ranks: int, hosts: int) -> str:
    return f"host-{rank * hosts // ranks}"


def _loss(step: int) -> float:
    return float(1.9 + 9.5 / (1.0 + step / 15.0) ** 0.7)


def _write_supervisor(run: Run, script: _Script) -> None:
    run.supervisor.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in script.supervisor))


def _write_rank(run: Run, rank: int, script: _Script, rng: np.random.Generator, *, monitor: bool, slow: bool) -> None:
    """One rank's file: the script's acts with this rank's own numbers, and what it measures beside them."""
    noise = rng.random((len(script.acts), 4))
    # The loss is the same on every rank, so its noise comes from the step, not from the rank.
    lines: list[str] = []
    shared = np.random.default_rng(7).standard_normal(script.steps)
    due = [BEGAN_S + MONITOR_S, BEGAN_S + PEERS_S]
    means: dict[int, tuple[float, float, float]] = {}
    for (t, event, fields), chance in zip(script.acts, noise, strict=True):
        while monitor and due[0] <= t:
            lines.append(_line("monitor", due[0], rank, _monitor(due[0], float(chance[3]), script.ranks)))
            due[0] += MONITOR_S
        while monitor and due[1] <= t:
            lines.append(_line("peers", due[1], rank, {"pairs": _pairs(rank, script, float(chance[2]))}))
            due[1] += PEERS_S
        if event == "step":
            fields = _step_fields(fields, float(shared[fields["step"]]), chance, slow=slow)
            fields["noise_scale"] = _noise_scale(fields, means)
        if event == "sample" and rank:
            continue
        lines.append(_line(event, t, rank, fields))
        if event == "step" and (fields["step"] + 1) % TIMELINE_EVERY == 0:
            lines.append(_line("timeline", t, rank, _timeline(fields)))
    run.events(rank).write_text("".join(lines), encoding="utf-8")


def _line(event: str, t: float, rank: int, fields: dict[str, Any]) -> str:
    line = {"v": 1, "event": event, "t": round(t, 6), "rank": rank, **fields}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


def _step_fields(act: dict[str, Any], shared: float, chance: np.ndarray, *, slow: bool) -> dict[str, Any]:
    step, own = act["step"], act["duration_s"] - (act["compile_s"] or 0.0)
    data_s, lr = 0.01 + 0.005 * float(chance[0]), 3e-4 * min(1.0, (step + 1) / 20)
    compute_s = own * (0.62 + 0.02 * float(chance[1])) * (1.5 if slow else 1.0)
    trace, squared = 900.0 * (1 + 0.2 * shared), 2.0 / (1 + step / 50) * (1 + 0.1 * float(chance[0]))
    sampled = (step + 1) % TIMELINE_EVERY == 0
    return {
        **act,
        "loss": _loss(step) + 0.03 * shared, "tokens": TOKENS, "grad_norm": 1.0 + 0.1 * shared, "lr": lr,
        "tokens_per_s": TOKENS / act["duration_s"], "memory_bytes": int(61 * GiB + 1e8 * float(chance[2])),
        "compute_s": compute_s, "wait_s": own - compute_s - data_s, "data_s": data_s, "skipped": False,
        "bytes_sent": 388140892160, "expert_imbalance": None, "held": step or None, "hold_s": None, "guard_s": None,
        "noise_scale": None, "noise_trace": trace, "grad_squared": squared,
        "collective_s": 0.9 if sampled else None, "collective_bytes": 388140892160 if sampled else None,
    }  # fmt: skip


def _noise_scale(step: dict[str, Any], means: dict[int, tuple[float, float, float]]) -> float | None:
    """Running means of both parts, weighed by the size that is usual, and then the quotient: as the trainer does."""
    number, size = step["step"], step["grad_norm"] ** 2
    trace, squared, usual = means.get(number - 1, (0.0, 0.0, size))
    trace = 0.99 * trace + 0.01 * step["noise_trace"] / usual
    squared = 0.99 * squared + 0.01 * step["grad_squared"] / usual
    means[number] = (trace, squared, 0.9 * usual + 0.1 * size)
    return trace / squared if number > 5 else None


def _monitor(t: float, chance: float, ranks: int) -> dict[str, Any]:
    return {
        "utilization": 0.86 + 0.05 * chance, "utilization_source": "gpm-sm", "memory_bytes": int(62 * GiB),
        "memory_limit_bytes": int(80 * GiB), "memory_pressure": 0.77, "memory_pressure_source": "limit",
        "allocation_retries": 0, "power_w": 640.0 + 30 * chance, "energy_j": 650.0 * (t - BEGAN_S),
        "energy_source": "nvml", "temperature_c": 61.0 + 4 * chance,
    }  # fmt: skip


def _pairs(rank: int, script: _Script, chance: float) -> list[dict[str, Any]]:
    tensor, found = script.plan["layout"]["tensor"], []
    if tensor > 1:
        found.append((rank ^ 1, "tensor"))
    if script.ranks > tensor:
        found.append(((rank + tensor) % script.ranks, "data"))
    return [
        {"peer": peer, "axis": axis, "count": 30, "p50_s": 1.2e-5 * (1 + chance), "p99_s": 4e-5, "lost": 0}
        for peer, axis in found
    ]


def _timeline(step: dict[str, Any]) -> dict[str, Any]:
    seconds, data_s, spans = step["duration_s"], step["data_s"], []
    spans.append(["data", "batch", 0.0, data_s, None, None])
    rest = seconds - data_s
    shares = (("forward", "forward", 0.3), ("collective", "all_gather", 0.05), ("backward", "backward", 0.55))
    at = data_s
    for kind, label, share in (*shares, ("collective", "reduce_scatter", 0.06), ("optimizer", "adamw", 0.03)):
        sent, group = (194070446080, "data") if kind == "collective" else (None, None)
        spans.append([kind, label, at, share * rest, sent, group])
        at += share * rest
    collectives = [
        {"op": name, "group": "data", "count": 32, "seconds": share * rest, "bytes": 194070446080}
        for name, share in (("all_gather", 0.05), ("reduce_scatter", 0.06))
    ]
    return {"step": step["step"], "seconds": seconds, "spans": spans, "dropped": 0, "collectives": collectives}
