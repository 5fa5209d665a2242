"""Quality-diversity search over plans, pipeline schedules and kernels; `phalanx.evolve` has its public functions."""
