"""Which nodes are free, rack by rack and block by block, and which of them a job is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from phalanx.sim.queue.queue_job import Domain

NONE_BARRED: frozenset[int] = frozenset()


class NodePool:
    """Nodes 0 to N - 1 in racks of equal size and blocks of racks; the last of each may be smaller.

    `packing` "first" gives the lowest numbers. Otherwise a job gets the smallest rack that holds it, else the smallest
    block, else whole blocks, largest first: best fit, which keeps the large gaps whole.
    """

    def __init__(self, *, nodes: int, nodes_per_rack: int, racks_per_block: int, packing: str) -> None:
        self.nodes, self.per_rack, self.per_block, self.packing = nodes, nodes_per_rack, racks_per_block, packing
        racks = range(0, nodes, nodes_per_rack)
        # Highest number first, so that pop() gives the lowest.
        self._rack_nodes = [list(range(min(nodes, first + nodes_per_rack) - 1, first - 1, -1)) for first in racks]
        self.racks_of_block = [
            range(first, min(len(self._rack_nodes), first + racks_per_block))
            for first in range(0, len(self._rack_nodes), racks_per_block)
        ]
        self._rack_domains = [range(rack, rack + 1) for rack in range(len(self._rack_nodes))]
        self._block_free = [self.free_in(racks) for racks in self.racks_of_block]
        # Racks by their number of free nodes: best fit must not look at all of them.
        self._racks_with: list[set[int]] = [set() for _ in range(nodes_per_rack + 1)]
        for rack, stock in enumerate(self._rack_nodes):
            self._racks_with[len(stock)].add(rack)
        self.free = nodes
        self._away: dict[int, int] = {}  # node -> reasons (failures, drains) for which it is out of service
        self._held: set[int] = set()  # nodes that jobs have

    # ---- what there is -----------------------------------------------------------------------------------------------

    def domain_of(self, need: int, domain: Domain) -> Domain:
        """Where a job's nodes must lie: its own choice, else what the packing demands of its size."""
        if domain:
            return domain
        if self.packing != "required":
            return "any"
        if need <= self.per_rack:
            return "rack"
        return "block" if need <= self.per_rack * self.per_block else "any"

    def could_ever_hold(self, need: int, domain: Domain) -> bool:
        """Whether the empty cluster has so many nodes in such a domain."""
        size = {"rack": self.per_rack, "block": self.per_rack * self.per_block}.get(domain, self.nodes)
        return need <= min(size, self.nodes)

    def rack_counts(self, nodes: Iterable[int]) -> dict[int, int]:
        """Nodes per rack."""
        counts: dict[int, int] = {}
        for node in nodes:
            rack = node // self.per_rack
            counts[rack] = counts.get(rack, 0) + 1
        return counts

    def domains(self, domain: Domain) -> list[range]:
        """Every rack, or every block, as the racks that it is made of."""
        if domain == "rack":
            return self._rack_domains
        return self.racks_of_block

    def free_in(self, racks: Iterable[int]) -> int:
        """Free nodes of some racks."""
        return sum(len(self._rack_nodes[rack]) for rack in racks)

    def domain_free(self, domain: Domain) -> list[int]:
        """Free nodes of every rack, or of every block."""
        return [len(stock) for stock in self._rack_nodes] if domain == "rack" else list(self._block_free)

    @property
    def in_service(self) -> int:
        """Nodes that are free or work for a job."""
        return self.free + len(self._held)

    # ---- giving and taking -------------------------------------------------------------------------------------------

    def fits(self, need: int, domain: Domain, barred: Collection[int] = NONE_BARRED) -> bool:
        """Whether `take` would find nodes now."""
        if need > self.free - (self.free_in(barred) if barred else 0):
            return False
        return domain == "any" or self._best_domain(need, domain, barred) is not None

    def take(self, need: int, domain: Domain, barred: Collection[int] = NONE_BARRED) -> list[int] | None:
        """So many free nodes outside the barred racks, or None: all of them or none."""
        if not self.fits(need, domain, barred):
            return None
        taken: list[int] = []
        for rack in self._racks_for(need, domain, barred):
            stock = self._rack_nodes[rack]
            before, wanted = len(stock), need - len(taken)
            taken += stock[: -wanted - 1 : -1]
            del stock[max(0, before - wanted) :]
            self._note_change(rack, before)
            if len(taken) == need:
                break
        self.free -= need
        self._held.update(taken)
        return taken

    def give_back(self, nodes: Collection[int]) -> None:
        """Nodes whose job ended; those that are out of service stay out."""
        by_rack: dict[int, list[int]] = {}
        for node in nodes:
            if node not in self._away:
                by_rack.setdefault(node // self.per_rack, []).append(node)
        self._held.difference_update(nodes)
        for rack, back in by_rack.items():
            stock = self._rack_nodes[rack]
            stock += back
            self._note_change(rack, len(stock) - len(back))
            self.free += len(back)

    def withdraw(self, node: int) -> None:
        """A node fails or is drained: nobody is given it until it was returned as often."""
        if node not in self._away and node not in self._held:
            rack = node // self.per_rack
            self._rack_nodes[rack].remove(node)
            self._note_change(rack, len(self._rack_nodes[rack]) + 1)
            self.free -= 1
        self._away[node] = self._away.get(node, 0) + 1

    def return_to_service(self, node: int) -> None:
        """The end of one withdrawal."""
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
        """A rack had `before` free nodes and has another number of them now."""
        now = len(self._rack_nodes[rack])
        self._block_free[rack // self.per_block] += now - before
        self._racks_with[before].remove(rack)
        self._racks_with[now].add(rack)

    # ---- packing -----------------------------------------------------------------------------------------------------

    def _best_domain(self, need: int, domain: Domain, barred: Collection[int]) -> range | None:
        """The rack or block with the fewest free nodes among those with enough; the first of equals."""
        if domain == "rack":
            for racks in self._racks_with[need:]:
                usable = racks.difference(barred) if barred else racks
                if usable:
                    return self._rack_domains[min(usable)]
            return None
        free = self._block_free
        if barred:
            free = [self._usable_free(racks, barred) for racks in self.racks_of_block]
        found = min((count, block) for block, count in enumerate(free) if count >= need) if max(free) >= need else None
        return self.racks_of_block[found[1]] if found else None

    def _racks_for(self, need: int, domain: Domain, barred: Collection[int]) -> list[int]:
        """Racks in the order in which they are emptied."""
        stock = self._rack_nodes
        if self.packing == "first":
            where = range(len(stock)) if domain == "any" else self._best_domain(need, domain, barred)
            return [rack for rack in where or () if rack not in barred]
        if need <= self.per_rack and domain != "block":
            rack = self._best_domain(need, "rack", barred)
            if rack is not None:
                return list(rack)
        block = self._best_domain(need, "block", barred)
        if block is not None:
            return self._within_block(need, block, barred)
        # More than any block has: whole blocks, the emptiest first, and best fit for the rest.
        by_free = sorted(self.racks_of_block, key=lambda racks: -self._usable_free(racks, barred))
        order: list[int] = []
        left = need
        for position, racks in enumerate(by_free):
            usable = [rack for rack in racks if rack not in barred]
            free = self.free_in(usable)
            if left <= free:
                # The smallest of those that are left and hold the rest.
                last = next(one for one in reversed(by_free[position:]) if self._usable_free(one, barred) >= left)
                return order + self._within_block(left, last, barred)
            order += usable
            left -= free
        return order

    def _usable_free(self, racks: range, barred: Collection[int]) -> int:
        return sum(len(self._rack_nodes[rack]) for rack in racks if rack not in barred)

    def _within_block(self, need: int, block: range, barred: Collection[int]) -> list[int]:
        """Racks of a block, the emptiest first; the last one is the smallest that holds the rest."""
        racks = sorted((rack for rack in block if rack not in barred), key=lambda rack: -len(self._rack_nodes[rack]))
        left = need
        for position, rack in enumerate(racks):
            if left <= len(self._rack_nodes[rack]):
                last = min(
                    (one for one in racks[position:] if len(self._rack_nodes[one]) >= left),
                    key=lambda one: len(self._rack_nodes[one]),
                )
                return [*racks[:position], last]
            left -= len(self._rack_nodes[rack])
        return racks
