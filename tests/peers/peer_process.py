"""A peer that is told what to do on stdin, in JSON lines, and says on stdout what came of it.

`hold_round` makes it stop in the middle of that round: it has all updates of its share, sums nothing, and waits for a
line on stdin with its only thread of communication.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from typing import Any

import numpy as np

from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import PeerEvent, PeerState, RunFacts
from phalanx.peers.group import PeerGroup
from phalanx.peers.identity import PeerIdentity

RUN = RunFacts(run_id="trial", model_digest="m" * 8, tokenizer_digest="t" * 8, code_digest="c" * 8)
printing = threading.Lock()


def out(kind: str, **facts: Any) -> None:
    with printing:
        print(json.dumps({"kind": kind, **facts}), flush=True)


def vector_of(peer: str, round_number: int, values: int) -> np.ndarray:
    """What a peer adds to a round, known to all."""
    seed = int(hashlib.sha256(f"{peer} {round_number}".encode()).hexdigest()[:8], 16)
    return np.random.default_rng(seed).standard_normal(values)


def shift_clocks(seconds: float) -> None:
    """This process thinks that it is later or earlier, as a machine whose clock is wrong."""
    if seconds:
        clocks = {name: getattr(time, name) for name in ("time", "monotonic")}
        for name, clock in clocks.items():
            setattr(time, name, lambda clock=clock: clock() + seconds)


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    settings = setup["settings"]
    hold = settings.pop("hold_round", None)
    shift_clocks(settings.pop("clock_skew_s", 0.0))
    current = {"round": -1}

    def screen(peer: str, vector: np.ndarray) -> str | None:
        if hold is not None and current["round"] == hold and not current.get("held"):
            current["held"] = 1
            out("held")
            released.wait()
        return None

    def tell(event: PeerEvent) -> None:
        out(event.kind, text=event.text, peer=event.peer, round=event.round_number, view=event.view_number)

    released = threading.Event()
    identity = PeerIdentity.from_pem(setup["key"], setup["certificate"], where="test")
    allowed = AllowList.from_json(setup["allowed"], where="test")
    chosen = screen if hold is not None else None
    group = PeerGroup(identity, RUN, allowed=allowed, events=tell, screen=chosen, **settings)
    commands: list[dict[str, Any]] = []
    arrived = threading.Condition()

    def read() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "release":
                released.set()
                continue
            if command["do"] == "go-on":  # while a call of `average` waits
                view = group.go_on_without_lost()
                out("alone", members=list(view.ids), next_round=view.next_round)
                continue
            with arrived:
                commands.append(command)
                arrived.notify_all()

    threading.Thread(target=read, daemon=True).start()
    state = {"weights": b"\0" * 3_000_000, "step": b"0"}
    while True:
        with arrived:
            arrived.wait_for(lambda: bool(commands))
            command = commands.pop(0)
        if command["do"] == "join":
            group.join([tuple(one) for one in command["addresses"]], timeout_s=30.0)
            out("address", address=list(group.address), next_round=group.view().next_round)
        elif command["do"] == "average":
            number = current["round"] = command["round"]
            vector = vector_of(group.id, number, command["values"])
            result = group.average(number, vector, command["weight"], "fp64", timeout_s=command.get("timeout_s", 60.0))
            found = [] if result.vector is None else result.vector[:50].tolist()
            digest = "" if result.vector is None else hashlib.sha256(result.vector.tobytes()).hexdigest()
            if result.vector is not None:
                state = {"weights": result.vector.tobytes(), "step": str(number).encode()}
                group.serve_state(lambda number=number, state=state: PeerState(round_number=number, tensors=state))
            facts = {"committed": result.committed, "behind": result.behind, "counted": list(result.members_counted)}
            out("result", round=number, digest=digest, head=found, reason=result.reason, **facts)
        elif command["do"] == "fetch":
            fetched: dict[str, bytes] = {}
            number = group.fetch_state(fetched.__setitem__, timeout_s=60.0)
            digest = hashlib.sha256(fetched["weights"]).hexdigest()
            out("fetched", round=number, names=sorted(fetched), digest=digest, step=fetched["step"].decode())
        elif command["do"] == "leave":
            group.leave()
            out("gone")
            return


if __name__ == "__main__":
    main()
