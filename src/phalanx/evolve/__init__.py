"""Quality-diversity search over plans, pipeline schedules and kernels.

The public functions, such as `phalanx.evolve.plans(...)`, live in api/evolve.py. A module in this folder must not have
the name of one of them, or it would hide the function.

>>> print(phalanx.evolve.plans("job.toml", cluster="8xH100:4"))  # doctest: +SKIP
"""
