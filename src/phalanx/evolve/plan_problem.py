"""The plan search problem: layout, pipeline schedule, and codec and H of slow links; priced by the planner.

A cluster is one synchronous job, or is divided into `peers` equal parts, each with a full copy of the model and a
part of the batch, which exchange updates every H steps (docs/slow-links.md). The axes of the grid are the memory that
a device needs and the bytes that a host sends per step.
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
SHARERS = {
    NONE: "none",
    FULL: "all",
    DOMAIN: "domain",
    GIVEN: "given",
}  # the group that shares one sharded copy of the model
BASE_GENES = {
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "ep": "ep",
    "micro": "micro_batch",
    "chunks": "vpp",
}  # gene: column of the space's table
# 1 MB to 10 TB per step, two per decade.
BYTE_EDGES = tuple(10.0 ** (6 + half / 2) for half in range(CELLS - 1))
# In a repair: weight of a gene that was changed on purpose; one that may follow has 1.
FIXED_WEIGHT = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPrice:
    """The planner's prediction for one layout of one part of the cluster."""

    step_s: float
    memory_bytes: float  # of the smallest device that the layout fits into
    sent_bytes: float  # per step, by a host to the other hosts of the same part
    runs: bool  # False where a pipeline stage would be empty or the logits are too large


@dataclass(frozen=True, kw_only=True)
class PeerSpace:
    """All layouts of one of `peers` equal parts of the cluster."""

    peers: int
    request: PlanRequest
    space: Space
    choices: dict[int, Ints] = field(default_factory=dict)  # cache: base row -> legal choice rows

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """The base rows as comparable numbers, [gene, row]: logarithms of sizes, and the index of the schedule."""
        columns = [np.log2(self.space.base[column]) for column in BASE_GENES.values()]
        table: NDArray[np.float32] = np.stack([*columns, self.space.base["schedule"]]).astype(np.float32)
        return table

    @cached_property
    def noise(self) -> NDArray[np.float32]:
        """Random tie-breakers between equally near rows; twice as many as rows, so that a window may start anywhere."""
        drawn = np.random.default_rng(0).random(2 * self.table.shape[1])
        noise: NDArray[np.float32] = (0.5 * drawn).astype(np.float32)
        return noise

    def legal_choices(self, base: int) -> Ints:
        """Return the choice rows that are legal with a base row."""
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
    memory_limits: tuple[float, ...]  # bytes of a device; each becomes an edge of the grid
    about: Mapping[str, Any]  # the job and the cluster, for the archive's digest
    inner_steps: tuple[int, ...] = INNER_STEPS  # choices of H; if empty, only one peer is considered
    name: str = "plans"
    batch: int = BATCH
    prices: dict[tuple[int, int, int], LayoutPrice] = field(
        default_factory=dict
    )  # cache: (peers, base row, choice row)

    @cached_property
    def axes(self) -> tuple[SearchAxis, SearchAxis]:
        device_bytes = self.request.cluster.accelerator.memory_bytes
        edges = [device_bytes * cell / CELLS for cell in range(1, CELLS)]
        for limit in self.memory_limits:
            if 0 < limit < device_bytes and limit not in edges:
                edges[min(range(len(edges)), key=lambda index: abs(edges[index] - limit))] = limit
        edges = sorted(set(edges))
        memory = SearchAxis(
            name="memory per device",
            edges=tuple(edges),
            labels=tuple(f"to {format_bytes(edge)}" for edge in (*edges, device_bytes)),
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
        """The layouts of one part, by number of peers; numbers of peers without any layout are left out."""
        request, spaces = self.request, {}
        hosts, batch = request.cluster.domains, request.global_sequences
        choices = [peers for peers in all_divisors(hosts) if batch % peers == 0 and (peers == 1 or self.inner_steps)]
        if len(choices) > MOST_PEER_CHOICES:
            places = np.linspace(0, len(choices) - 1, MOST_PEER_CHOICES).round().astype(int)
            choices = [choices[place] for place in places]
        for peers in choices:
            part_request = replace(request, global_sequences=batch // peers)
            space = build_space(part_request, devices=request.cluster.devices // peers)
            if space.rows:
                spaces[peers] = PeerSpace(peers=peers, request=part_request, space=space)
        return spaces

    @cached_property
    def parameters(self) -> float:
        """The number of values that peers exchange."""
        return float(count_parameters(self.request.model).total)

    def describe(self) -> Mapping[str, Any]:
        """Return the values of job and cluster that a price depends on."""
        return self.about

    # ---- candidates ----------------------------------------------------------------------------------------------

    def seeds(self) -> Sequence[Genome]:
        """Return common plans: sharded data parallelism, tensor parallelism within a host, a pipeline between hosts.

        Some of them, such as ZeRO-3 alone, are far from every other plan that fits, so that small changes would not
        reach them.
        """
        rng, cluster = np.random.default_rng(0), self.request.cluster
        plain = {"peers": 1, "codec": "none", "h": 1, "cp": 1, "ep": 1, "micro": 1, "chunks": 1}
        plain |= {"schedule": "1f1b", "shared_by": "all"}
        genomes = [
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
        return tuple(genomes)

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """Draw a legal plan at random."""
        while True:
            peer_space = self.spaces[_pick(rng, list(self.spaces))]
            base = int(rng.integers(peer_space.space.base["tp"].size))
            choices = peer_space.legal_choices(base)
            if choices.size:
                exchange = {"codec": _pick(rng, CODECS), "h": _pick(rng, self.inner_steps or (1,))}
                return self._genome(peer_space, base, int(rng.choice(choices)), exchange)

    def _genome(self, part: PeerSpace, base: int, choice: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the candidate of a base row and a choice row; codec and H come from `wanted`."""
        rows, choice_columns = part.space.base, part.space.choice
        has_peers = part.peers > 1
        return {
            "peers": part.peers,
            "codec": wanted["codec"] if has_peers else "none",
            "h": wanted["h"] if has_peers else 1,
            **{gene: int(rows[column][base]) for gene, column in BASE_GENES.items()},
            "schedule": SCHEDULES[int(rows["schedule"][base])],
            "zero": int(choice_columns["zero"][choice]),
            "shared_by": SHARERS[int(choice_columns["group"][choice])],
            "recompute": RECOMPUTE[int(choice_columns["recompute"][choice])],
            "sequence_parallel": bool(choice_columns["sp"][choice]),
        }

    @cached_property
    def gene_values(self) -> dict[str, tuple[Any, ...]]:
        """The values of each gene that occur in the space, in order; genes with a single value are left out."""
        spaces = [peer_space.space for peer_space in self.spaces.values()]

        def values_of(table: str, column: str) -> list[int]:
            return sorted({int(value) for space in spaces for value in np.unique(getattr(space, table)[column])})

        values: dict[str, Sequence[Any]] = {
            "peers": list(self.spaces),
            **{gene: values_of("base", column) for gene, column in BASE_GENES.items()},
            "schedule": [SCHEDULES[value] for value in values_of("base", "schedule")],
            "zero": values_of("choice", "zero"),
            "shared_by": [SHARERS[value] for value in values_of("choice", "group")],
            "recompute": [RECOMPUTE[value] for value in values_of("choice", "recompute")],
            "sequence_parallel": [bool(value) for value in values_of("choice", "sp")],
        }
        if list(self.spaces) != [1]:
            values |= {"codec": CODECS, "h": self.inner_steps}
        return {name: tuple(gene_values) for name, gene_values in values.items() if len(gene_values) > 1}

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Change one gene or a few, mostly to a neighbouring value; other genes follow where legality requires it."""
        genes = [name for name in self.gene_values if genome["peers"] > 1 or name not in ("codec", "h")]
        if not genes:
            return genome
        count = min(len(genes), 1 + int(rng.geometric(0.6) - 1))
        changed = [genes[index] for index in rng.choice(len(genes), size=count, replace=False)]
        wanted = dict(genome)
        for name in changed:
            legal_values = self.gene_values[name]
            place = legal_values.index(wanted[name]) if wanted[name] in legal_values else 0
            neighbours = [index for index in (place - 1, place + 1) if 0 <= index < len(legal_values)]
            wanted[name] = legal_values[_pick(rng, neighbours)] if rng.random() < 0.7 else _pick(rng, legal_values)
        return self._repair(wanted, changed, rng)

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Take each gene from one of two candidates at random, and repair the result."""
        wanted = {name: (first if rng.random() < 0.5 else second)[name] for name in first}
        return self._repair(wanted, (), rng)

    def _repair(self, wanted: Mapping[str, Any], kept: Sequence[str], rng: np.random.Generator) -> Genome:
        """Return the legal plan nearest to the wanted one; genes in `kept` are changed last."""
        peer_space = self.spaces[wanted["peers"]] if wanted["peers"] in self.spaces else self.spaces[min(self.spaces)]
        genes = (*BASE_GENES, "schedule")
        weights = np.array([FIXED_WEIGHT if gene in kept else 1.0 for gene in genes], dtype=np.float32)
        sizes = [math.log2(max(1, wanted[gene])) for gene in BASE_GENES]
        target = np.array([*sizes, SCHEDULES.index(wanted["schedule"])], dtype=np.float32)
        gaps = np.abs(peer_space.table - target[:, None])
        gaps[-1] = gaps[-1] > 0  # schedules are names: any two of them are equally far apart
        rows = gaps.shape[1]
        begin = int(rng.integers(rows))
        base = int(np.argmin(weights @ gaps + peer_space.noise[begin : begin + rows]))
        choice_columns = peer_space.space.choice
        choices = peer_space.legal_choices(base)
        wanted_group = next(number for number, name in SHARERS.items() if name == wanted["shared_by"])

        def weight(gene: str) -> float:
            return FIXED_WEIGHT if gene in kept else 1.0

        distance = (
            weight("zero") * np.abs(choice_columns["zero"][choices] - wanted["zero"])
            + weight("shared_by") * (choice_columns["group"][choices] != wanted_group)
            + weight("recompute") * np.abs(choice_columns["recompute"][choices] - RECOMPUTE.index(wanted["recompute"]))
            + weight("sequence_parallel") * (choice_columns["sp"][choices] != wanted["sequence_parallel"])
        )
        if not choices.size:
            return self.random_genome(rng)
        choice = int(choices[int(np.argmin(distance + rng.random(choices.size) * 0.5))])
        exchange = {"codec": wanted["codec"] if wanted["codec"] in CODECS else _pick(rng, CODECS)}
        exchange["h"] = wanted["h"] if wanted["h"] in self.inner_steps else _pick(rng, self.inner_steps or (1,))
        return self._genome(peer_space, base, choice, exchange)

    def all_genomes(self) -> Iterator[Genome]:
        """Yield every legal plan, as the ground truth to compare a search with; only for small spaces."""
        for peer_space in self.spaces.values():
            exchanges = [{"codec": codec, "h": h} for codec in CODECS for h in self.inner_steps]
            for base in range(peer_space.space.base["tp"].size):
                for choice in peer_space.legal_choices(base):
                    for exchange in exchanges if peer_space.peers > 1 else ({},):
                        yield self._genome(peer_space, base, int(choice), exchange)

    # ---- evaluation by the planner -----------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> dict[int, tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]]]:
        """Base rows and choice rows by their values, for each number of peers."""
        rows = {}
        for peers, peer_space in self.spaces.items():
            base = np.stack([peer_space.space.base[name] for name in (*BASE_GENES.values(), "schedule")], axis=1)
            choices = np.stack([peer_space.space.choice[name] for name in ("zero", "group", "recompute", "sp")], axis=1)
            rows[peers] = (
                {tuple(row): place for place, row in enumerate(base.tolist())},
                {tuple(row): place for place, row in enumerate(choices.tolist())},
            )
        return rows

    def row_of(self, genome: Genome) -> tuple[int, int, int]:
        """Return (peers, base row, choice row) of a plan; raise KeyError if it is not in the space."""
        bases, choices = self._rows[genome["peers"]]
        group = next(number for number, name in SHARERS.items() if name == genome["shared_by"])
        base = bases[(*(genome[gene] for gene in BASE_GENES), SCHEDULES.index(genome["schedule"]))]
        recompute = RECOMPUTE.index(genome["recompute"])
        return genome["peers"], base, choices[genome["zero"], group, recompute, int(genome["sequence_parallel"])]

    def layout(self, genome: Genome) -> Layout:
        """Return the layout of each part of the cluster."""
        peers, base, choice = self.row_of(genome)
        return self.spaces[peers].space.layout(base, choice)

    def sync(self, genome: Genome) -> SyncSettings:
        """Return the settings of the exchange between the parts of the cluster."""
        if genome["peers"] == 1:
            return SyncSettings()
        return SyncSettings(mode="diloco", peers=genome["peers"], codec=genome["codec"], inner_steps=genome["h"])

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """Predict tokens per second, memory per device and bytes sent per step of each plan."""
        rows = [self.row_of(genome) for genome in genomes]
        for peers in {row[0] for row in rows}:
            self._price_new(peers, sorted({row for row in rows if row[0] == peers and row not in self.prices}))
        return [self._outcome(genome, self.prices[row]) for genome, row in zip(genomes, rows, strict=True)]

    def _price_new(self, peers: int, rows: Sequence[tuple[int, int, int]]) -> None:
        """Price the rows of one number of peers, all at once, into `prices`."""
        if not rows:
            return
        peer_space = self.spaces[peers]
        layouts = [peer_space.space.layout(base, choice) for _, base, choice in rows]
        cases, times, memory = price_layouts(peer_space.request, layouts)
        step_s = np.broadcast_to(times.step_s, len(rows))
        total, runs = np.broadcast_to(memory.total, len(rows)), np.broadcast_to(memory.runs, len(rows))
        usable = float(np.max(peer_space.request.memory.usable))
        for place, row in enumerate(rows):
            layout_case = cases.take(slice(place, place + 1))
            self.prices[row] = LayoutPrice(
                step_s=float(step_s[place]),
                memory_bytes=float(total[place]) / usable,
                sent_bytes=bytes_between_domains(peer_space.request, layouts[place], layout_case),
                runs=bool(runs[place]),
            )

    def _outcome(self, genome: Genome, price: LayoutPrice) -> SearchOutcome:
        """Return fitness and position of a plan, or the reason why it cannot run."""
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
        """Return the same problem with `bytes_per_s` per host, to all other hosts together."""
        cluster = self.request.cluster
        slower = replace(cluster, nic_bytes_per_s=bytes_per_s / cluster.domain_devices)
        return replace(self, request=replace(self.request, cluster=slower), prices={})

    def features(self, genomes: Sequence[Genome]) -> Floats:
        """Return the logarithms of sizes, the choices one-hot, and every product of two of these."""
        batch, devices = self.request.global_sequences, self.request.cluster.devices
        rows = []
        for genome in genomes:
            dp = devices / genome["peers"] / (genome["tp"] * genome["cp"] * genome["pp"])
            sizes = np.log2(
                [
                    *(genome[gene] for gene in BASE_GENES),
                    dp,
                    batch / genome["peers"] / (dp * genome["micro"]),
                    genome["h"],
                ]
            )
            flags = [
                genome["peers"] > 1,
                np.log2(genome["peers"]),
                *(genome["codec"] == codec for codec in CODECS[1:]),
                *(genome["schedule"] == name for name in SCHEDULES),
                *(genome["zero"] == stage for stage in (1, 2, 3)),
                genome["shared_by"] == "domain",
                *(genome["recompute"] == name for name in RECOMPUTE[1:]),
                genome["sequence_parallel"],
                genome["pp"] > 1,
                dp > 1,
                genome["tp"] * genome["cp"] * dp > self.request.cluster.domain_devices,
            ]
            rows.append([*sizes, *map(float, flags)])
        table = np.array(rows, dtype=np.float64).reshape(len(genomes), -1)
        first, second = np.triu_indices(table.shape[1])
        return np.hstack((table, table[:, first] * table[:, second]))

    # ---- a language model ------------------------------------------------------------------------------------------

    def read_genome(self, data: object) -> Genome:
        """Read a plan from untrusted JSON and repair genes that do not go together.

        Raises ValueError if a gene is missing, of the wrong type or of an unknown value.
        """
        if not isinstance(data, Mapping):
            raise ValueError("not a JSON object")
        wanted: dict[str, Any] = {}
        for name, example in self.random_genome(np.random.default_rng(0)).items():
            value = data.get(name)
            if type(value) is not type(example) or (isinstance(value, int) and not 0 <= value <= 1 << 30):
                raise ValueError(f"{name} is no {type(example).__name__}")
            wanted[name] = value
        named = {"schedule": SCHEDULES, "recompute": RECOMPUTE, "shared_by": tuple(SHARERS.values())}
        for name, legal_values in {**named, "codec": ("none", *CODECS)}.items():
            if wanted[name] not in legal_values:
                raise ValueError(f"{name} is none of {', '.join(legal_values)}")
        return self._repair(wanted, (), np.random.default_rng(0))

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """Return the prompt: the job, the cluster, this plan and the planner's predictions for it."""
        assert outcome.place is not None
        values = "\n".join(
            f"  {name}: {', '.join(map(str, legal_values))}" for name, legal_values in self.gene_values.items()
        )
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
