"""Reader of a run folder: streams its event files once and sums them up as `LogFacts`."""
