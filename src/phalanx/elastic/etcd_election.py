"""Election in etcd (version 3.4 or newer), over the JSON gateway that every member serves at /v3.

One key per run, bound to an etcd lease: while its holder renews the lease the key stays, and no other process can
create it. When the holder is dead, frozen or cut off, etcd deletes the key. The revision at which a key was created
only grows: it is the term.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from phalanx.elastic.election import Deposed, ElectionUnavailable
from phalanx.elastic.json_http import HttpProblem, ask_json
from phalanx.elastic.lease_clock import LeaseClock

PREFIX = "/phalanx/"
# Between reads of the seconds that a lease has left: etcd returns whole seconds.
TTL_S = 1.1


class EtcdElection:
    """An election whose terms are the creation revisions of an etcd key."""

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        *,
        lease_clock: LeaseClock | None = None,
    ) -> None:
        self.term = 0
        self._endpoints = [endpoint.strip().rstrip("/") for endpoint in endpoints]
        self._key = base64.b64encode(f"{PREFIX}{name}".encode()).decode()
        self.lease_clock = LeaseClock() if lease_clock is None else lease_clock
        self._lease = ""

    def take(self) -> bool:
        """Become the coordinator, unless another process renews its lease."""
        while True:
            asked_s = self.lease_clock.now()
            lease = str(self._ask("lease/grant", {"TTL": str(math.ceil(self.lease_clock.lease_s))})["ID"])
            is_absent = {"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
            put = {"request_put": {"key": self._key, "value": base64.b64encode(b"held").decode(), "lease": lease}}
            answer = self._ask("kv/txn", {"compare": [is_absent], "success": [put]})
            if answer.get("succeeded"):
                self.term, self._lease = int(answer["header"]["revision"]), lease
                self.lease_clock.take_lease(asked_s)
                return True
            with suppress(ElectionUnavailable):
                self._ask("lease/revoke", {"ID": lease})
            if self._is_renewed():
                return False

    def _is_renewed(self) -> bool:
        """True when the holder renews its lease: the seconds left do not become fewer. False once the key is gone."""
        remaining_s: int | None = None
        while (holder := self._held()) is not None:
            now = int(self._ask("lease/timetolive", {"ID": str(holder.get("lease", "0"))}).get("TTL", "-1"))
            # At 0 the lease is over: etcd has yet to delete the key.
            if remaining_s is not None and now >= remaining_s and now > 0:
                return True
            remaining_s = now
            self.lease_clock.sleep(max(TTL_S, self.lease_clock.renew_s))
        return False

    def _held(self) -> dict[str, Any] | None:
        rows = self._ask("kv/range", {"key": self._key}).get("kvs") or [None]
        return rows[0] if isinstance(rows[0], dict) else None

    def renew(self) -> None:
        """Renew the lease, at most once in `renew_s`; raises Deposed when it is over."""
        if not self.lease_clock.begin_renewal():
            return
        try:
            answer = self._ask("lease/keepalive", {"ID": self._lease})
        except ElectionUnavailable:
            self.lease_clock.trust_lease(self.term)
            return
        if int((answer.get("result") or {}).get("TTL", "0")) <= 0:
            raise Deposed(f"the lease of term {self.term} is over")
        self.lease_clock.end_renewal()

    def check(self) -> None:
        """Raise Deposed when the key no longer belongs to this process."""
        try:
            holder = self._held()
        except ElectionUnavailable:
            self.lease_clock.trust_lease(self.term)
            return
        if holder is None or int(holder["create_revision"]) != self.term:
            raise Deposed(f"term {self.term} is over")

    def release(self) -> None:
        """Revoke the lease; etcd deletes the key with it."""
        with suppress(ElectionUnavailable):
            self._ask("lease/revoke", {"ID": self._lease})

    def is_held(self) -> bool:
        """True when the key exists: etcd deletes that of a holder that is gone."""
        return self._held() is not None

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the first member that gives one; the next request tries that member first."""
        problems = []
        for endpoint in list(self._endpoints):
            try:
                status, answer = ask_json(endpoint, f"/v3/{path}", body=body)
            except HttpProblem as error:
                problems.append(str(error))
                continue
            if status == 200:
                self._endpoints.sort(key=lambda address: address != endpoint)
                return answer
            problems.append(
                f"{endpoint}: status {status}, {answer.get('message') or answer.get('error') or 'no reason'}"
            )
        raise ElectionUnavailable("; ".join(problems))
