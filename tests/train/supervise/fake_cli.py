"""A caller that launches the fake agent: `python fake_cli.py BEHAVIOUR RUN`; prints the wishes and the outcome."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from phalanx.record.run import open_run
from phalanx.train.supervise.client import launch

if __name__ == "__main__":
    done = launch(
        open_run(sys.argv[2]),
        environ=os.environ,
        tick=lambda: None,
        asked=lambda count: print(f"asked {count}", flush=True),
        agent=(str(Path(__file__).with_name("fake_agent.py")), sys.argv[1]),
    )
    print(f"{done.state} {done.exit_code}\n{done.message}")
    sys.exit(done.exit_code)
