"""Plans as candidates: a layout, its pipeline schedule, and the codec and H of slow links; priced by the planner.

A cluster is one synchronous job, or is cut into `peers` equal parts, each with the whole model and a part of the batch,
which exchange updates every H steps (docs/slow-links.md). The grid: memory a device needs × bytes a host sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.evolve.problem import Floats, Genome, SearchAxis, SearchOutcome
from phalanx.job.parameter_counts import count_parameters
from phalanx.job.sync_section import CODECS, SyncSettings
from phalanx.plan.cases import RECOMPUTE, SCHEDULES
from phalanx.plan.layout import Layout
from phalanx.plan.mapping import bytes_between_domains
from phalanx.plan.request import PlanRequest
from phalanx.plan.score import price_layouts
from phalanx.plan.site_plan import GRID_INNER_STEPS
from phalanx.plan.slow_exchange import PeerLink
from phalanx.plan.slow_modes import SitePace, predict_mode
from phalanx.plan.space import (
    DOMAIN,
    FULL,
    GIVEN,
    NONE,
    Ints,
    Space,
    build_space,
    may_recompute,
    may_share,
    may_split_sequence,
)
from phalanx.units import all_divisors, format_bytes

CELLS = 16  # along each axis
BATCH = 25
MOST_PEER_CHOICES = 6
INNER_STEPS = tuple(steps for steps in GRID_INNER_STEPS if steps > 1)
SHARERS = {NONE: "none", FULL: "all", DOMAIN: "domain", GIVEN: "given"}  # who shares a sharded copy
BASE_GENES = {
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "ep": "ep",
    "micro": "micro_batch",
    "chunks": "vpp",
}  # our name: column
BYTE_EDGES = tuple(10.0 ** (6 + half / 2) for half in range(CELLS - 1))  # 1 MB to 10 TB per step, two per decade
FIXED_WEIGHT = 50.0  # in a repair: a gene that was changed on purpose against one that may follow


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPrice:
    """What the planner says of one layout of one part of the cluster."""

    step_s: float
    memory_bytes: float  # of a device that it fits into
    sent_bytes: float  # by a host of the part to others of the same part, per step
    runs: bool


@dataclass(frozen=True, kw_only=True)
class PeerSpace:
    """All layouts of one of `peers` equal parts of the cluster."""

    peers: int
    request: PlanRequest
    space: Space
    choices: dict[int, Ints] = field(default_factory=dict)  # base row -> choice rows that go with it, once asked for

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """Base rows as numbers that can be compared, [gene, row]: logarithms of sizes, and the schedule."""
        columns = [np.log2(self.space.base[column]) for column in BASE_GENES.values()]
        found: NDArray[np.float32] = np.stack([*columns, self.space.base["schedule"]]).astype(np.float32)
        return found

    @cached_property
    def noise(self) -> NDArray[np.float32]:
        """Decides between rows that are equally near; twice as long as needed, so that it can begin anywhere."""
        drawn = np.random.default_rng(0).random(2 * self.table.shape[1])
        found: NDArray[np.float32] = (0.5 * drawn).astype(np.float32)
        return found

    def legal_choices(self, base: int) -> Ints:
        """Choice rows that go with a base row."""
        if base in self.choices:
            return self.choices[base]
        columns = {name: value[base : base + 1] for name, value in self.space.base.items()} | self.space.choice
        legal = (
            may_share(self.request, columns)
            & may_split_sequence(self.request, columns)
            & may_recompute(self.request, columns)
        )
        self.choices[base] = np.flatnonzero(np.broadcast_to(legal, self.space.choice["zero"].shape))
        return self.choices[base]


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """The plans of one job on one cluster."""

    request: PlanRequest
    memory_limits: tuple[float, ...]  # bytes of a device: cells begin and end there
    about: Mapping[str, Any]  # the job and the cluster, for the archive's digest
    inner_steps: tuple[int, ...] = INNER_STEPS  # that peers may take between exchanges; none leaves peers out
    name: str = "plans"
    batch: int = BATCH
    prices: dict[tuple[int, int, int], LayoutPrice] = field(default_factory=dict)  # (peers, base, choice)

    @cached_property
    def axes(self) -> tuple[SearchAxis, SearchAxis]:
        most = self.request.cluster.accelerator.memory_bytes
        edges = [most * cell / CELLS for cell in range(1, CELLS)]
        for limit in self.memory_limits:
            if 0 < limit < most and limit not in edges:
                edges[min(range(len(edges)), key=lambda one: abs(edges[one] - limit))] = limit
        edges = sorted(set(edges))
        memory = SearchAxis(
            name="memory per device",
            edges=tuple(edges),
            labels=tuple(f"to {format_bytes(edge)}" for edge in (*edges, most)),
        )
        words = tuple(f"to {format_bytes(edge)}" for edge in BYTE_EDGES)
        sent = SearchAxis(
            name="bytes a host sends per step",
            edges=BYTE_EDGES,
            labels=(*words, f"over {format_bytes(BYTE_EDGES[-1])}"),
            logarithmic=True,
        )
        return memory, sent

    @cached_property
    def spaces(self) -> dict[int, PeerSpace]:
        """Peers -> layouts of each; empty ones are left out."""
        request, found = self.request, {}
        hosts, batch = request.cluster.domains, request.global_sequences
        choices = [peers for peers in all_divisors(hosts) if batch % peers == 0 and (peers == 1 or self.inner_steps)]
        if len(choices) > MOST_PEER_CHOICES:
            places = np.linspace(0, len(choices) - 1, MOST_PEER_CHOICES).round().astype(int)
            choices = [choices[place] for place in places]
        for peers in choices:
            part = replace(request, global_sequences=batch // peers)
            space = build_space(part, devices=request.cluster.devices // peers)
            if space.rows:
                found[peers] = PeerSpace(peers=peers, request=part, space=space)
        return found

    @cached_property
    def parameters(self) -> float:
        """Values that peers exchange."""
        return float(count_parameters(self.request.model).total)

    def describe(self) -> Mapping[str, Any]:
        """The job's and the cluster's values that a price depends on."""
        return self.about

    # ---- candidates ----------------------------------------------------------------------------------------------

    def seeds(self) -> Sequence[Genome]:
        """What people try first: sharded data parallelism, tensor groups in a host, a pipeline between hosts.

        Some are far from everything else that fits (ZeRO-3 alone), where no small change leads.
        """
        rng, cluster = np.random.default_rng(0), self.request.cluster
        plain = {"peers": 1, "codec": "none", "h": 1, "cp": 1, "ep": 1, "micro": 1, "chunks": 1}
        plain |= {"schedule": "1f1b", "shared_by": "all"}
        found = [
            self._repair(
                {**plain, "tp": tp, "pp": pp, "zero": zero, "recompute": recompute, "sequence_parallel": tp > 1},
                ("tp", "pp", "zero", "recompute", "micro"),
                rng,
            )
            for recompute in ("none", "full")
            for zero in (3, 1)
            for tp in (1, min(2, cluster.domain_devices), cluster.domain_devices)
            for pp in (1, max(2, cluster.domains))
        ]
        return tuple(found)

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """Any legal plan."""
        while True:
            part = self.spaces[_pick(rng, list(self.spaces))]
            base = int(rng.integers(part.space.base["tp"].size))
            choices = part.legal_choices(base)
            if choices.size:
                wanted = {"codec": _pick(rng, CODECS), "h": _pick(rng, self.inner_steps or (1,))}
                return self._genome(part, base, int(rng.choice(choices)), wanted)

    def _genome(self, part: PeerSpace, base: int, choice: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        rows, ways = part.space.base, part.space.choice
        slow = part.peers > 1
        return {
            "peers": part.peers,
            "codec": wanted["codec"] if slow else "none",
            "h": wanted["h"] if slow else 1,
            **{gene: int(rows[column][base]) for gene, column in BASE_GENES.items()},
            "schedule": SCHEDULES[int(rows["schedule"][base])],
            "zero": int(ways["zero"][choice]),
            "shared_by": SHARERS[int(ways["group"][choice])],
            "recompute": RECOMPUTE[int(ways["recompute"][choice])],
            "sequence_parallel": bool(ways["sp"][choice]),
        }

    @cached_property
    def gene_values(self) -> dict[str, tuple[Any, ...]]:
        """What each gene may be anywhere in the space, in order; genes with one value are left out."""
        spaces = [part.space for part in self.spaces.values()]

        def seen(table: str, column: str) -> list[int]:
            return sorted({int(one) for space in spaces for one in np.unique(getattr(space, table)[column])})

        values: dict[str, Sequence[Any]] = {
            "peers": list(self.spaces),
            **{gene: seen("base", column) for gene, column in BASE_GENES.items()},
            "schedule": [SCHEDULES[one] for one in seen("base", "schedule")],
            "zero": seen("choice", "zero"),
            "shared_by": [SHARERS[one] for one in seen("choice", "group")],
            "recompute": [RECOMPUTE[one] for one in seen("choice", "recompute")],
            "sequence_parallel": [bool(one) for one in seen("choice", "sp")],
        }
        if list(self.spaces) != [1]:
            values |= {"codec": CODECS, "h": self.inner_steps}
        return {name: tuple(known) for name, known in values.items() if len(known) > 1}

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """One gene or a few to a neighbouring value, or any; the others follow as far as they must."""
        genes = [name for name in self.gene_values if genome["peers"] > 1 or name not in ("codec", "h")]
        if not genes:
            return genome
        count = min(len(genes), 1 + int(rng.geometric(0.6) - 1))
        changed = [genes[one] for one in rng.choice(len(genes), size=count, replace=False)]
        wanted = dict(genome)
        for name in changed:
            known = self.gene_values[name]
            place = known.index(wanted[name]) if wanted[name] in known else 0
            near = [one for one in (place - 1, place + 1) if 0 <= one < len(known)]
            wanted[name] = known[_pick(rng, near)] if rng.random() < 0.7 else _pick(rng, known)
        return self._repair(wanted, changed, rng)

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Every gene of one of the two."""
        wanted = {name: (first if rng.random() < 0.5 else second)[name] for name in first}
        return self._repair(wanted, (), rng)

    def _repair(self, wanted: Mapping[str, Any], kept: Sequence[str], rng: np.random.Generator) -> Genome:
        """The legal plan nearest to the wanted one; genes in `kept` give way last."""
        part = self.spaces[wanted["peers"]] if wanted["peers"] in self.spaces else self.spaces[min(self.spaces)]
        genes = (*BASE_GENES, "schedule")
        weights = np.array([FIXED_WEIGHT if gene in kept else 1.0 for gene in genes], dtype=np.float32)
        sizes = [math.log2(max(1, wanted[gene])) for gene in BASE_GENES]
        target = np.array([*sizes, SCHEDULES.index(wanted["schedule"])], dtype=np.float32)
        gaps = np.abs(part.table - target[:, None])
        gaps[-1] = gaps[-1] > 0  # another schedule is another schedule, however far in the list
        rows = gaps.shape[1]
        begin = int(rng.integers(rows))
        base = int(np.argmin(weights @ gaps + part.noise[begin : begin + rows]))
        ways = part.space.choice
        choices = part.legal_choices(base)
        wanted_group = next(number for number, name in SHARERS.items() if name == wanted["shared_by"])

        def weight(gene: str) -> float:
            return FIXED_WEIGHT if gene in kept else 1.0

        far = (
            weight("zero") * np.abs(ways["zero"][choices] - wanted["zero"])
            + weight("shared_by") * (ways["group"][choices] != wanted_group)
            + weight("recompute") * np.abs(ways["recompute"][choices] - RECOMPUTE.index(wanted["recompute"]))
            + weight("sequence_parallel") * (ways["sp"][choices] != wanted["sequence_parallel"])
        )
        if not choices.size:
            return self.random_genome(rng)
        choice = int(choices[int(np.argmin(far + rng.random(choices.size) * 0.5))])
        slow = {"codec": wanted["codec"] if wanted["codec"] in CODECS else _pick(rng, CODECS)}
        slow["h"] = wanted["h"] if wanted["h"] in self.inner_steps else _pick(rng, self.inner_steps or (1,))
        return self._genome(part, base, choice, slow)

    def all_genomes(self) -> Iterator[Genome]:
        """Every legal plan, to hold a search against; only for small spaces."""
        for part in self.spaces.values():
            slow = [{"codec": codec, "h": h} for codec in CODECS for h in self.inner_steps]
            for base in range(part.space.base["tp"].size):
                for choice in part.legal_choices(base):
                    for wanted in slow if part.peers > 1 else ({},):
                        yield self._genome(part, base, int(choice), wanted)

    # ---- what the planner says -------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> dict[int, tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]]]:
        """Peers -> rows of both tables by their values."""
        found = {}
        for peers, part in self.spaces.items():
            base = np.stack([part.space.base[name] for name in (*BASE_GENES.values(), "schedule")], axis=1)
            ways = np.stack([part.space.choice[name] for name in ("zero", "group", "recompute", "sp")], axis=1)
            found[peers] = (
                {tuple(row): place for place, row in enumerate(base.tolist())},
                {tuple(row): place for place, row in enumerate(ways.tolist())},
            )
        return found

    def row_of(self, genome: Genome) -> tuple[int, int, int]:
        """(peers, base row, choice row) of a plan; raises KeyError where it is not in the space."""
        bases, ways = self._rows[genome["peers"]]
        group = next(number for number, name in SHARERS.items() if name == genome["shared_by"])
        base = bases[(*(genome[gene] for gene in BASE_GENES), SCHEDULES.index(genome["schedule"]))]
        recompute = RECOMPUTE.index(genome["recompute"])
        return genome["peers"], base, ways[genome["zero"], group, recompute, int(genome["sequence_parallel"])]

    def layout(self, genome: Genome) -> Layout:
        """The layout of each part of the cluster."""
        peers, base, choice = self.row_of(genome)
        return self.spaces[peers].space.layout(base, choice)

    def sync(self, genome: Genome) -> SyncSettings:
        """How the parts of the cluster exchange what they learn."""
        if genome["peers"] == 1:
            return SyncSettings()
        return SyncSettings(mode="diloco", peers=genome["peers"], codec=genome["codec"], inner_steps=genome["h"])

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """Predicted tokens per second, memory and bytes of each plan."""
        rows = [self.row_of(genome) for genome in genomes]
        for peers in {row[0] for row in rows}:
            self._price_new(peers, sorted({row for row in rows if row[0] == peers and row not in self.prices}))
        return [self._outcome(genome, self.prices[row]) for genome, row in zip(genomes, rows, strict=True)]

    def _price_new(self, peers: int, rows: Sequence[tuple[int, int, int]]) -> None:
        if not rows:
            return
        part = self.spaces[peers]
        layouts = [part.space.layout(base, choice) for _, base, choice in rows]
        cases, times, memory = price_layouts(part.request, layouts)
        step_s = np.broadcast_to(times.step_s, len(rows))
        total, runs = np.broadcast_to(memory.total, len(rows)), np.broadcast_to(memory.runs, len(rows))
        usable = float(np.max(part.request.memory.usable))
        for place, row in enumerate(rows):
            one = cases.take(slice(place, place + 1))
            self.prices[row] = LayoutPrice(
                step_s=float(step_s[place]),
                memory_bytes=float(total[place]) / usable,
                sent_bytes=bytes_between_domains(part.request, layouts[place], one),
                runs=bool(runs[place]),
            )

    def _outcome(self, genome: Genome, price: LayoutPrice) -> SearchOutcome:
        device, peers = self.request.cluster.accelerator.memory_bytes, genome["peers"]
        if not price.runs:
            return SearchOutcome(fitness=None, why="a pipeline stage would be empty, or the logits too large")
        if price.memory_bytes > device:
            return SearchOutcome(fitness=None, why=f"needs a device of {format_bytes(price.memory_bytes)}")
        tokens, cluster = float(self.request.sequence * self.request.global_sequences), self.request.cluster
        # The planner hides sends of a pipeline behind compute, as on the networks of its measurements; no host sends
        # faster than its link.
        step_s = max(price.step_s, price.sent_bytes / (cluster.nic_bytes_per_s * cluster.domain_devices))
        if peers == 1:
            fitness, sent = tokens / step_s, price.sent_bytes
        else:
            devices = cluster.devices // peers
            rate = cluster.nic_bytes_per_s * devices
            pace = [
                SitePace(
                    name=f"peer {number}",
                    devices=devices,
                    step_s=step_s,
                    tokens_per_step=tokens / peers,
                    link=PeerLink(name="", bytes_per_s=rate, latency_s=cluster.nic_latency_s),
                )
                for number in range(peers)
            ]
            mode = predict_mode(pace, self.parameters, self.sync(genome))
            fitness, sent = mode.tokens_per_s, price.sent_bytes + mode.bytes_per_step * peers / cluster.domains
        return SearchOutcome(fitness=fitness, place=(price.memory_bytes, sent))

    def at_link(self, bytes_per_s: float) -> PlanProblem:
        """The same plans where each host has so much to all others together."""
        cluster = self.request.cluster
        slower = replace(cluster, nic_bytes_per_s=bytes_per_s / cluster.domain_devices)
        return replace(self, request=replace(self.request, cluster=slower), prices={})

    def features(self, genomes: Sequence[Genome]) -> Floats:
        """Logarithms of sizes, the choices one by one, and every product of two."""
        batch, devices = self.request.global_sequences, self.request.cluster.devices
        rows = []
        for one in genomes:
            dp = devices / one["peers"] / (one["tp"] * one["cp"] * one["pp"])
            sizes = np.log2(
                [*(one[gene] for gene in BASE_GENES), dp, batch / one["peers"] / (dp * one["micro"]), one["h"]]
            )
            flags = [
                one["peers"] > 1,
                np.log2(one["peers"]),
                *(one["codec"] == codec for codec in CODECS[1:]),
                *(one["schedule"] == name for name in SCHEDULES),
                *(one["zero"] == stage for stage in (1, 2, 3)),
                one["shared_by"] == "domain",
                *(one["recompute"] == name for name in RECOMPUTE[1:]),
                one["sequence_parallel"],
                one["pp"] > 1,
                dp > 1,
                one["tp"] * one["cp"] * dp > self.request.cluster.domain_devices,
            ]
            rows.append([*sizes, *map(float, flags)])
        table = np.array(rows, dtype=np.float64).reshape(len(genomes), -1)
        first, second = np.triu_indices(table.shape[1])
        return np.hstack((table, table[:, first] * table[:, second]))

    # ---- a language model ------------------------------------------------------------------------------------------

    def read_genome(self, data: object) -> Genome:
        """A plan that somebody wrote: every gene must exist, what does not go together is repaired."""
        if not isinstance(data, Mapping):
            raise ValueError("not a JSON object")
        wanted: dict[str, Any] = {}
        for name, example in self.random_genome(np.random.default_rng(0)).items():
            value = data.get(name)
            if type(value) is not type(example) or (isinstance(value, int) and not 0 <= value <= 1 << 30):
                raise ValueError(f"{name} is no {type(example).__name__}")
            wanted[name] = value
        named = {"schedule": SCHEDULES, "recompute": RECOMPUTE, "shared_by": tuple(SHARERS.values())}
        for name, known in {**named, "codec": ("none", *CODECS)}.items():
            if wanted[name] not in known:
                raise ValueError(f"{name} is none of {', '.join(known)}")
        return self._repair(wanted, (), np.random.default_rng(0))

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """The job, the cluster, this plan and what the planner says of it."""
        assert outcome.place is not None
        values = "\n".join(f"  {name}: {', '.join(map(str, known))}" for name, known in self.gene_values.items())
        return (
            f"Improve a plan to train a model in parallel.\n"
            f"Job and cluster: {dict(self.about)}\n"
            f"Plan: {dict(genome)}\n"
            f"Predicted: {outcome.fitness:.6g} tokens/s, a device of {outcome.place[0]:.4g} bytes, "
            f"{outcome.place[1]:.4g} bytes from a host per step.\n"
            f"Genes that may change, with all their values:\n{values}\n"
            f"Answer with one JSON object that holds only the genes to change."
        )


def _pick(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]
