"""Handing a planned job to the system that places it: this machine, Slurm, Kubernetes.

resource_request.py computes what to ask for from the plan alone, settings.py what person, job and site chose,
system.py is what a launch system must be able to do. node.py runs on every host: it starts the
host's agent and tends it.
"""
