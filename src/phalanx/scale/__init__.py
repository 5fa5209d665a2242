"""Scaling laws: a law fitted to small runs sizes the large one.

`phalanx.scale.fit(...)` and the other public functions are defined in api/scale.py. No module of this package may
have one of their names, as it would hide the function.

>>> law = phalanx.scale.fit("runs.csv")  # doctest: +SKIP
>>> print(phalanx.scale.allocate(law, budget="1e21"))  # doctest: +SKIP
"""
