"""Start the ranks of a run, watch them, recover from failures, and report in one message why a run failed."""
