"""What there is to look at: the run log, this host, drills, and how the trainer is known to behave."""
