"""Scaling laws: small runs decide the large one.

`phalanx.scale.fit(...)` and the other public functions live in api/scale.py; no module here may have their names, or it
would hide them.

>>> law = phalanx.scale.fit("runs.csv")  # doctest: +SKIP
>>> print(phalanx.scale.allocate(law, budget="1e21"))  # doctest: +SKIP
"""
