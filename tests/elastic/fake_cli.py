"""A caller that launches fake agents: `python fake_cli.py BEHAVIOUR RUN RANKS [HOSTS [interrupted-writes]]`.

Prints wishes and outcome. With interrupted-writes the first write to stdout is hit by a Ctrl-C.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

from phalanx.elastic import local_launch as client
from phalanx.record.run import open_run


class Interrupted(io.FileIO):
    """A file whose first write is interrupted."""

    interrupts = 1

    def write(self, data: Any) -> int:
        if self.interrupts:
            self.interrupts -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(data)


if __name__ == "__main__":
    behaviour, folder, ranks, hosts, *more = [*sys.argv[1:], "1"][: max(4, len(sys.argv) - 1)]
    if more:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(Interrupted(1, "w", closefd=False)), write_through=True)
    # On a busy machine an agent may live for long before a test kills it: that forgives no earlier end here.
    client.RESTART_S, client.STABLE_S = 0.2, 1e9
    done = client.launch(
        open_run(folder),
        hosts=client.local_hosts(int(ranks), hosts=int(hosts)),
        environ=os.environ,
        tick=lambda: None,
        asked=lambda count: print(f"asked {count}", flush=True),
        agent=(str(Path(__file__).with_name("fake_agent.py")), behaviour),
    )
    print(f"{done.state} {done.exit_code}\n{done.message}")
    sys.exit(done.exit_code)
