"""Free nodes of a cluster by rack and block, and the choice of nodes for a job."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from phalanx.sim.queue.queue_job import Domain

NONE_BARRED: frozenset[int] = frozenset()


class NodePool:
    """Nodes 0 to N - 1 in racks of equal size and blocks of racks; the last of each may be smaller.

    `packing` "first" gives the lowest numbers. Otherwise a job gets the smallest rack that holds it, else the
    smallest block, else whole blocks, largest first: best fit, which keeps large gaps together.
    """

    def __init__(self, *, nodes: int, nodes_per_rack: int, racks_per_block: int, packing: str) -> None:
        self.nodes, self.per_rack, self.per_block, self.packing = nodes, nodes_per_rack, racks_per_block, packing
        racks = range(0, nodes, nodes_per_rack)
        # Highest number first, so that pop() returns the lowest.
        self._rack_nodes = [list(range(min(nodes, first + nodes_per_rack) - 1, first - 1, -1)) for first in racks]
        self.racks_of_block = [
            range(first, min(len(self._rack_nodes), first + racks_per_block))
            for first in range(0, len(self._rack_nodes), racks_per_block)
        ]
        self._rack_domains = [range(rack, rack + 1) for rack in range(len(self._rack_nodes))]
        self._block_free = [self.free_in(racks) for racks in self.racks_of_block]
        # Racks by their number of free nodes, so that best fit need not search all of them.
        self._racks_with: list[set[int]] = [set() for _ in range(nodes_per_rack + 1)]
        for rack, stock in enumerate(self._rack_nodes):
            self._racks_with[len(stock)].add(rack)
        self.free = nodes
        # Node -> number of reasons (failures, drains) for which it is out of service.
        self._away: dict[int, int] = {}
        self._held: set[int] = set()  # nodes in use by jobs

    # ---- queries -----------------------------------------------------------------------------------------------------

    def domain_of(self, need: int, domain: Domain) -> Domain:
        """Return where a job's nodes must lie: its own choice, else as the packing requires for its size."""
        if domain:
            return domain
        if self.packing != "required":
            return "any"
        if need <= self.per_rack:
            return "rack"
        return "block" if need <= self.per_rack * self.per_block else "any"

    def could_ever_hold(self, need: int, domain: Domain) -> bool:
        """Return True if an empty cluster has `need` nodes in such a domain."""
        size = {"rack": self.per_rack, "block": self.per_rack * self.per_block}.get(domain, self.nodes)
        return need <= min(size, self.nodes)

    def rack_counts(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return the number of the nodes in each rack."""
        counts: dict[int, int] = {}
        for node in nodes:
            rack = node // self.per_rack
            counts[rack] = counts.get(rack, 0) + 1
        return counts

    def domains(self, domain: Domain) -> list[range]:
        """Return every rack, or every block, as a range of racks."""
        if domain == "rack":
            return self._rack_domains
        return self.racks_of_block

    def free_in(self, racks: Iterable[int]) -> int:
        """Return the number of free nodes in some racks."""
        return sum(len(self._rack_nodes[rack]) for rack in racks)

    def domain_free(self, domain: Domain) -> list[int]:
        """Return the free nodes of every rack, or of every block."""
        return [len(stock) for stock in self._rack_nodes] if domain == "rack" else list(self._block_free)

    @property
    def in_service(self) -> int:
        """The number of nodes that are free or in use by a job."""
        return self.free + len(self._held)

    # ---- allocation --------------------------------------------------------------------------------------------------

    def fits(self, need: int, domain: Domain, barred: Collection[int] = NONE_BARRED) -> bool:
        """Return True if `take` would find nodes now."""
        if need > self.free - (self.free_in(barred) if barred else 0):
            return False
        return domain == "any" or self._best_domain(need, domain, barred) is not None

    def take(self, need: int, domain: Domain, barred: Collection[int] = NONE_BARRED) -> list[int] | None:
        """Take `need` free nodes outside the barred racks; returns all of them, or None."""
        if not self.fits(need, domain, barred):
            return None
        chosen: list[int] = []
        for rack in self._racks_for(need, domain, barred):
            stock = self._rack_nodes[rack]
            before, missing = len(stock), need - len(chosen)
            chosen += stock[: -missing - 1 : -1]
            del stock[max(0, before - missing) :]
            self._note_change(rack, before)
            if len(chosen) == need:
                break
        self.free -= need
        self._held.update(chosen)
        return chosen

    def give_back(self, nodes: Collection[int]) -> None:
        """Return the nodes of a job that ended; those that are out of service stay out."""
        by_rack: dict[int, list[int]] = {}
        for node in nodes:
            if node not in self._away:
                by_rack.setdefault(node // self.per_rack, []).append(node)
        self._held.difference_update(nodes)
        for rack, returned in by_rack.items():
            stock = self._rack_nodes[rack]
            stock += returned
            self._note_change(rack, len(stock) - len(returned))
            self.free += len(returned)

    def withdraw(self, node: int) -> None:
        """Withdraw a node that fails or is drained; it is unavailable until it was returned as often."""
        if node not in self._away and node not in self._held:
            rack = node // self.per_rack
            self._rack_nodes[rack].remove(node)
            self._note_change(rack, len(self._rack_nodes[rack]) + 1)
            self.free -= 1
        self._away[node] = self._away.get(node, 0) + 1

    def return_to_service(self, node: int) -> None:
        """End one withdrawal of a node."""
        self._away[node] -= 1
        if not self._away[node]:
            del self._away[node]
            if node not in self._held:
                self._put_into_rack(node)

    def _put_into_rack(self, node: int) -> None:
        rack = node // self.per_rack
        self._rack_nodes[rack].append(node)
        self._note_change(rack, len(self._rack_nodes[rack]) - 1)
        self.free += 1

    def _note_change(self, rack: int, before: int) -> None:
        """Update the indices for a rack that had `before` free nodes and now has another number."""
        now = len(self._rack_nodes[rack])
        self._block_free[rack // self.per_block] += now - before
        self._racks_with[before].remove(rack)
        self._racks_with[now].add(rack)

    # ---- packing -----------------------------------------------------------------------------------------------------

    def _best_domain(self, need: int, domain: Domain, barred: Collection[int]) -> range | None:
        """Return the rack or block with the fewest free nodes among those with enough; the first of equals."""
        if domain == "rack":
            for racks in self._racks_with[need:]:
                usable = racks.difference(barred) if barred else racks
                if usable:
                    return self._rack_domains[min(usable)]
            return None
        free = self._block_free
        if barred:
            free = [self._usable_free(racks, barred) for racks in self.racks_of_block]
        smallest = (
            min((count, block) for block, count in enumerate(free) if count >= need) if max(free) >= need else None
        )
        return self.racks_of_block[smallest[1]] if smallest else None

    def _racks_for(self, need: int, domain: Domain, barred: Collection[int]) -> list[int]:
        """Return racks in the order in which their nodes are taken."""
        stock = self._rack_nodes
        if self.packing == "first":
            candidates = range(len(stock)) if domain == "any" else self._best_domain(need, domain, barred)
            return [rack for rack in candidates or () if rack not in barred]
        if need <= self.per_rack and domain != "block":
            rack = self._best_domain(need, "rack", barred)
            if rack is not None:
                return list(rack)
        block = self._best_domain(need, "block", barred)
        if block is not None:
            return self._within_block(need, block, barred)
        # More than any block has: whole blocks, the emptiest first, and best fit for the remainder.
        by_free = sorted(self.racks_of_block, key=lambda racks: -self._usable_free(racks, barred))
        order: list[int] = []
        remaining = need
        for position, racks in enumerate(by_free):
            usable = [rack for rack in racks if rack not in barred]
            free = self.free_in(usable)
            if remaining <= free:
                # Of the blocks after this position, the smallest that holds the remainder.
                last = next(
                    block_racks
                    for block_racks in reversed(by_free[position:])
                    if self._usable_free(block_racks, barred) >= remaining
                )
                return order + self._within_block(remaining, last, barred)
            order += usable
            remaining -= free
        return order

    def _usable_free(self, racks: range, barred: Collection[int]) -> int:
        return sum(len(self._rack_nodes[rack]) for rack in racks if rack not in barred)

    def _within_block(self, need: int, block: range, barred: Collection[int]) -> list[int]:
        """Return racks of a block, the emptiest first; the last one is the smallest that holds the remainder."""
        racks = sorted((rack for rack in block if rack not in barred), key=lambda rack: -len(self._rack_nodes[rack]))
        remaining = need
        for position, rack in enumerate(racks):
            if remaining <= len(self._rack_nodes[rack]):
                last = min(
                    (candidate for candidate in racks[position:] if len(self._rack_nodes[candidate]) >= remaining),
                    key=lambda candidate: len(self._rack_nodes[candidate]),
                )
                return [*racks[:position], last]
            remaining -= len(self._rack_nodes[rack])
        return racks
