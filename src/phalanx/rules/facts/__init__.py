"""Facts that rules read as evidence: the run log, this host, drill records, data, and behaviour of trainers."""
