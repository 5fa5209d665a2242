"""The planner: (Job, Cluster) -> Plan. `phalanx.plan(...)` is also the public function (phalanx/__init__.py)."""
