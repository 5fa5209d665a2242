"""Quality-diversity search over plans, pipeline schedules and kernels.

`phalanx.evolve.plans(...)` and the other public functions live in api/evolve.py; no module here may have their names,
or it would hide them.

>>> print(phalanx.evolve.plans("job.toml", cluster="8xH100:4"))  # doctest: +SKIP
"""
