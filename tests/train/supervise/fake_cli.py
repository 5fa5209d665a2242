"""A caller that launches fake agents: `python fake_cli.py BEHAVIOUR RUN RANKS [HOSTS]`; prints wishes and outcome."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from phalanx.record.run import open_run
from phalanx.train.supervise import client

if __name__ == "__main__":
    behaviour, folder, ranks, hosts = [*sys.argv[1:], "1"][:4]
    client.RESTART_S = 0.2
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
