"""The planner: it makes a Plan from a Job and a Cluster.

`phalanx.plan(...)` is also the public function (phalanx/__init__.py).
"""
