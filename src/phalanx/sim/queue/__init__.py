"""A cluster and its queue in time: when jobs of all sizes start, and what stands idle or is lost meanwhile."""
