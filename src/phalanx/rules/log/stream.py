"""A run log as a stream: each line of each rank is read once, in constant memory, also while the run grows.

blocks  →  events (record/event_batches.py)  →  checked columns (grammar.py)  →  sums of constant size

About a kilobyte is kept per rank. For the observer, the lowest rank on record, the sums over its steps are kept
too. Numbers that need the order of time over all ranks (ledger, failures) come from the record's accounts
(accounts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.io.files import Spot
from phalanx.io.values import at, printable
from phalanx.record.account.ledger import LedgerStream
from phalanx.record.account.rank_places import rank_places
from phalanx.record.archive.history import MANY_RANKS, RunHistory, spread_ranks
from phalanx.record.event_batches import ByteTally, EventFeed, gc_paused
from phalanx.record.run import Run
from phalanx.record.run_lock import is_run_over
from phalanx.rules.facts.log_facts import GrammarFacts, LogFacts, StepFacts
from phalanx.rules.log import accounts
from phalanx.rules.log.agreement import LoggedMemberships, clock_skew, skips_differ
from phalanx.rules.log.folder import has_provenance, is_job_changed, launch_of, listens
from phalanx.rules.log.rank_log import Counted, RankLog, Supervisor

# Bytes read of a rank before the next one has its turn, where there is a budget.
TURN_BYTES = 32 * 2**20
MOST_MISSING = 4096
# Of more than MANY_RANKS ranks, only some events are read: 16,384 hosts x 10,000 steps are 75 GB.
MANY_BYTES, LEAST_READ = 8 * 2**20, 2
MOST_WORLD = 10_000_000  # limit of the numbers in names of event files
# The ledger is computed again when the run has grown by this share, so that a look at a long run every second is
# cheap.
AGAIN_SHARE, SMALL_BYTES = 0.05, 4 * 2**20
# Events that a log must have, in addition to the steps themselves.
BEGINS, REPORTED, ENDS = "run_start", ("epoch", "restore"), "run_end"

Progress = Callable[[int, int], None]


class LogStream:
    """Reads a run log: call `refresh`, then `facts`, repeatedly while the run continues."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._shown = str(run.path)
        self._history = RunHistory(run)
        self._begin_reading()

    def _begin_reading(self) -> None:
        memberships = LoggedMemberships(_plan_layout(self.run))
        self._all, self._reported = Counted(memberships), Supervisor(memberships)
        self._tally = ByteTally()
        self._supervisor = EventFeed(self.run.supervisor, self._shown, tally=self._tally)
        self._ranks: dict[int, RankLog] = {}
        self._recorded: list[int] = []
        self._account, self._account_bytes = accounts.Account(), -1
        self._passing: LedgerStream | None = None

    @property
    def bytes_read(self) -> int:
        """The number of bytes read so far."""
        return self._tally.read_bytes

    @property
    def bytes_left(self) -> int:
        """The number of bytes that exist and were not read."""
        self._list_folder()
        return self._supervisor.left_bytes + sum(rank_log.feed.left_bytes for rank_log in self._ranks.values())

    def _list_folder(self) -> None:
        """List the folder once for all ranks; one listing per rank would read a thousand files a thousand times."""
        parts = self.run.event_parts()
        for rank, rank_log in self._ranks.items():
            rank_log.feed.closed = parts.get(rank, [])

    def refresh(self, budget_bytes: int | None = None, *, progress: Progress | None = None) -> bool:
        """Read new events, at most about `budget_bytes`. Returns whether there were any."""
        before = self.bytes_read
        self._recorded = list(self.run.recorded())
        ranks_to_read = self._read_ranks(self._recorded)
        if self._ranks and ranks_to_read and ranks_to_read[0] < min(self._ranks):
            # A lower rank has appeared: it becomes the observer, and its steps are read from the first.
            self._begin_reading()
        # For a finished run that is read at once, the ledger is made while the observer's events stream by.
        at_once = budget_bytes is None and not self._ranks and ranks_to_read and is_run_over(self.run)
        passing = LedgerStream.of(self.run, self._history, ranks_to_read[0]) if at_once else None
        for rank in ranks_to_read:
            if rank not in self._ranks:
                feed = EventFeed(self.run.events(rank), self._shown, tally=self._tally)
                self._ranks[rank] = RankLog(rank, feed, self._all, witness=rank == ranks_to_read[0])
        self._pass_on(passing)
        self._list_folder()
        for piece in self._supervisor.pieces(budget_bytes):
            self._reported.take(piece, self._all.lines, self._all.grammar, self._all.secrets)
        self._read(before, budget_bytes, progress)
        return self.bytes_read != before

    def _read_ranks(self, recorded: list[int]) -> list[int]:
        """Return the ranks whose events are read: all, or, of very many, as many as MANY_BYTES allows, evenly
        spread.
        """
        if len(recorded) <= MANY_RANKS:
            return recorded
        if len(self._ranks) > 1:  # chosen before, when the run was shorter
            return list(self._ranks)
        rank_bytes = max(1, EventFeed(self.run.events(recorded[0]), "").left_bytes)
        return list(spread_ranks(recorded, min(max(LEAST_READ, MANY_BYTES // rank_bytes), len(recorded))))

    def _pass_on(self, passing: LedgerStream | None) -> None:
        """Pass the observer's events, from the first on, to a ledger; ends the passing to an earlier one."""
        self._passing = passing
        for place, rank in enumerate(self._ranks.values()):
            rank.passing = passing if place == 0 else None

    def _read(self, before: int, budget_bytes: int | None, progress: Progress | None) -> None:
        total = self.bytes_read + self.bytes_left if progress is not None else 0
        for rank in self._rank_turns(before, budget_bytes):
            rank_budget = None if budget_bytes is None else min(TURN_BYTES, before + budget_bytes - self.bytes_read)
            for piece in rank.feed.pieces(rank_budget):
                with gc_paused():
                    rank.take(piece)
                if progress is not None:
                    progress(self.bytes_read, total)

    def _rank_turns(self, before: int, budget_bytes: int | None) -> Iterator[RankLog]:
        """Yield every rank once; with a budget, in turns until it is used up, while unread events remain."""
        ranks = list(self._ranks.values())
        if budget_bytes is None:
            yield from ranks
            return
        while ranks and self.bytes_read - before < budget_bytes:
            waiting = []
            for rank in ranks:
                if self.bytes_read - before >= budget_bytes:
                    return
                read_before = rank.feed.read_bytes
                yield rank
                if rank.feed.read_bytes > read_before and rank.feed.left_bytes:
                    waiting.append(rank)
            ranks = waiting

    # ---- facts -------------------------------------------------------------------------------------------------------

    def facts(self) -> LogFacts:
        """Return all facts about the part of the run that was read."""
        is_over = is_run_over(self.run)
        account = self._run_accounts(ended=is_over)
        steps = self._step_facts()
        launch = launch_of(self.run)
        self._all.secrets.look_around(self.run, self._shown)
        supervisor = self._reported if self._supervisor.read_bytes else None
        walked = account.walked
        step_s = steps.duration_s.p50 if steps is not None and steps.duration_s is not None else None
        text = self.run.status().get("message", "")
        lines = str(text).splitlines() if isinstance(text, str) else []
        facts = LogFacts(
            run=self.run.name,
            folder=self._shown,
            state=printable(self.run.status().get("state", ""), most=40),
            is_over=is_over,
            message=printable(lines[0], most=200) if lines else "",
            world=min(self._world_size(), MOST_WORLD),
            ranks=tuple(self._recorded),
            ranks_read=len(self._ranks),
            wall_s=walked.ledger.wall_s if walked is not None else None,
            bytes_left=self.bytes_left,
            steps=steps,
            digests=self._all.digests.facts(),
            noise=self._all.steps.noise(),
            memberships=(supervisor.memberships if supervisor else None)
            or (walked.ledger.formations if walked else None),
            preflights=supervisor.preflights if supervisor and supervisor.memberships else None,
            refused_hosts=supervisor.refused if supervisor else 0,
            incidents=account.incidents,
            detect_s=accounts.detect_s(walked, supervisor.failures if supervisor else (), step_s),
            recovery_s=accounts.recovery_s(account.incidents),
            most_in_a_row=supervisor.most_in_a_row if supervisor else 0,
            ledger=walked.ledger if walked is not None else None,
            effective=walked.ledger.effective if walked is not None and walked.ledger.steps else None,
            lowest_hour=account.lowest_hour,
            imbalance=self._rank_imbalance(),
            telemetry_share=self._telemetry_share(),
            mfu=accounts.mfu_of(self.run, steps.tokens_per_s if steps is not None else None),
            listens=listens(self.run, launch),
            is_drill=launch.get("drill") is True,
        )
        return self._with_accounts(self._with_measurements(facts), account, launch)

    def _world_size(self) -> int:
        """Return the number of ranks of the newest launch; without a supervisor, of all ranks on record."""
        reported_world = self._reported.world if self._supervisor.read_bytes else 0
        return max(self.run.world() or 0, reported_world or len(self._recorded))

    def _with_measurements(self, made: LogFacts) -> LogFacts:
        """Add the facts about devices, neighbours and checkpoints."""
        ranks = self._ranks.values()
        retries = [rank_log.retries for rank_log in ranks if rank_log.retries is not None]
        restores = (self._reported.restores if self._supervisor.read_bytes else None) or [
            restore for rank_log in ranks for restore in rank_log.restores
        ]
        has_saves = self._all.saves.is_reported or restores
        world = self._world_size()
        return replace(
            made,
            monitor=self._all.monitors.facts(
                [rank_log.monitor_gaps for rank_log in ranks if "monitor" in rank_log.kinds],
                peak=max((rank_log.peak_bytes for rank_log in ranks if rank_log.rank < world), default=0.0),
                retries=sum(retries) if retries else None,
                # Scaled to all ranks where only some were read.
                energy_j=sum(rank_log.meter.energy_j for rank_log in ranks) * len(self._recorded) / max(1, len(ranks)),
            ),
            peers=self._all.peers.facts([rank_log.peer_gaps for rank_log in ranks if "peers" in rank_log.kinds]),
            checkpoints=self._all.saves.facts(self.run, restores, self._reported.rollback)
            if has_saves or made.steps is not None
            else None,
        )

    def _with_accounts(self, made: LogFacts, known: accounts.Account, launch: Mapping[str, Any]) -> LogFacts:
        """Add stragglers, money and energy, and last the grammar, which uses all other facts."""
        scores = known.scores
        paid = known.cost
        return replace(
            made,
            stragglers=scores.named if scores is not None else (),
            straggler_scores=len(scores.score) if scores is not None and scores.score else None,
            usd=paid.usd if paid is not None else None,
            energy_j=paid.energy_j if paid is not None else None,
            grammar=self._grammar_facts(made, launch),
        )

    def _run_accounts(self, *, ended: bool) -> accounts.Account:
        """Return the accounts; they are not computed again for a run in progress that has hardly grown."""
        read, before = self.bytes_read, self._account_bytes
        little = not ended and read >= SMALL_BYTES and read - before <= AGAIN_SHARE * before
        if before < 0 or (read != before and not little):
            self._account = accounts.account_of_run(self.run, self._history, self._passing)
            self._account_bytes = read
            self._pass_on(None)
        return self._account

    def _step_facts(self) -> StepFacts | None:
        ranks = self._ranks.values()
        facts = self._all.steps.facts()
        if facts is None:
            return None
        complete = {rank_log.rank: rank_log for rank_log in ranks if rank_log.is_whole and rank_log.spans}
        skips = {rank: rank_log.skips for rank, rank_log in complete.items() if rank_log.skips}
        differ = skips_differ(skips, {rank: rank_log.spans for rank, rank_log in complete.items()}) if skips else None
        return replace(facts, skips_differ=differ)

    def _telemetry_share(self) -> float | None:
        """Return the share of the step time in which telemetry delayed the training, over the ranks that log it."""
        reports = [
            (rank_log.telemetry_s, rank_log.took_s)
            for rank_log in self._ranks.values()
            if rank_log.telemetry_s is not None
        ]
        took_s = sum(took_s for _, took_s in reports)
        return sum(spent_s for spent_s, _ in reports) / took_s if took_s else None

    def _rank_imbalance(self) -> float | None:
        """Return the slowest rank's own step time over the mean of ranks with the same work, in the worst group."""
        world = self._world_size()
        present = [rank_log for rank_log in self._ranks.values() if rank_log.rank < world]
        own_times_s = {
            rank_log.rank: (rank_log.took_s - rank_log.waited_s) / rank_log.steps
            for rank_log in present
            if rank_log.steps
        }
        positive_times_s = {rank: own_s for rank, own_s in own_times_s.items() if own_s > 0.0}
        # Only ranks with the same work are compared: stages of a pipeline differ by design.
        where = rank_places({"layout": _plan_layout(self.run)}, self._history.supervisor())
        groups = [[positive_times_s[rank] for rank in group] for group in where.same_work(sorted(positive_times_s))]
        return max((max(group) * len(group) / sum(group) for group in groups if len(group) > 1), default=None)

    # ---- grammar -----------------------------------------------------------------------------------------------------

    def _grammar_facts(self, made: LogFacts, launch: Mapping[str, Any]) -> GrammarFacts:
        grammar = self._all.grammar
        damaged, spot = self._damaged_lines(ended=made.is_over)
        missing, repeated = self._wrong_occurrences(made)
        return GrammarFacts(
            unreadable=grammar.unreadable + damaged,
            unreadable_spot=grammar.unreadable_spot or spot,
            invalid=grammar.invalid,
            invalid_spot=grammar.invalid_spot,
            invalid_text=grammar.invalid_text,
            unknown_kinds=dict(grammar.unknown),
            missing=missing,
            repeated=repeated,
            out_of_order=grammar.out_of_order,
            out_of_order_spot=grammar.out_of_order_spot,
            unclosed=self._unclosed_failures(made),
            skew_s=clock_skew(rank_log.offsets for rank_log in self._ranks.values()),
            ranks_missing=self._missing_ranks(made),
            secrets=self._all.secrets.count,
            secrets_spot=self._all.secrets.spot,
            secrets_partial=self._all.secrets.is_partial,
            has_provenance=has_provenance(launch),
            job_changed=is_job_changed(self.run, launch),
        )

    def _damaged_lines(self, *, ended: bool) -> tuple[int, Spot | None]:
        """Return the number of damaged lines and the first place: too long, in unusable files, or cut at the end."""
        feeds = [self._supervisor, *(rank_log.feed for rank_log in self._ranks.values())]
        torn = [feed for feed in feeds if ended and feed.is_torn]
        spots = [feed.bad_spot for feed in feeds if feed.bad_spot is not None] + [feed.here for feed in torn]
        return sum(feed.bad for feed in feeds) + len(torn), spots[0] if spots else None

    def _wrong_occurrences(self, made: LogFacts) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the events that are missing and those that occur too often.

        Events that a run in progress will still write are not missing yet.
        """
        missing, repeated = [], []
        ranks, event_counts = list(self._ranks.values()), self._reported.kinds
        has_begun = made.steps is not None or made.is_over
        is_read = made.is_over and not made.bytes_left
        if not ranks and made.is_over:
            missing.append("events of any rank")
        if any(BEGINS not in rank_log.kinds for rank_log in ranks if "step" in rank_log.kinds or is_read):
            missing.append(BEGINS)
        if self._supervisor.read_bytes and has_begun:
            missing += [kind for kind in REPORTED if kind not in event_counts]
        if is_read and made.state == "done" and ranks and ENDS not in ranks[0].kinds:
            missing.append(ENDS)
        if is_read and self._supervisor.read_bytes and "end" not in event_counts:
            missing.append("end")
        # A resumed run has an end per launch.
        starts = max(1, self._reported.launches)
        if event_counts.get("end", 0) > starts:
            repeated.append("end")
        if any(rank_log.states.count("done") > starts for rank_log in ranks):
            repeated.append(ENDS)
        # Memberships differ in generation, so a rank never starts one twice.
        if self._supervisor.read_bytes and any(rank_log.begun_again for rank_log in ranks):
            repeated.append(BEGINS)
        return tuple(missing), tuple(repeated)

    def _missing_ranks(self, made: LogFacts) -> tuple[int, ...]:
        """Return the ranks without a record; before the first step they may still appear."""
        if made.steps is None and not made.is_over:
            return ()
        recorded = set(self._recorded)
        return tuple(islice((rank for rank in range(made.world) if rank not in recorded), MOST_MISSING))

    def _unclosed_failures(self, made: LogFacts) -> int:
        """Return the number of failures without a later step or end; 0 while the run continues."""
        if not made.is_over:
            return 0
        ended_s = self._reported.ended_s
        return sum(
            incident.recovery_s is None and (ended_s is None or ended_s < incident.t) for incident in made.incidents
        )


def read_log(run: Run, *, progress: Progress | None = None) -> LogFacts:
    """Read the whole log of a run and return its facts."""
    stream = LogStream(run)
    stream.refresh(progress=progress)
    return stream.facts()


def _plan_layout(run: Run) -> dict[str, object]:
    try:
        return dict(at(run.plan(), "layout"))
    except PhalanxError:
        return {}
