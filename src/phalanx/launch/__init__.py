"""Launching a planned job on the system that places it: this machine, Slurm or Kubernetes.

resource_request.py computes the request from the plan alone, settings.py merges the choices of user, job and site, and
system.py defines the interface of a launch system. node.py runs on every host: it starts the host's agent and restarts
it when it dies.
"""
