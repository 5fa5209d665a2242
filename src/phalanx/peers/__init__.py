"""Peers that train together over slow links: identity, transport, membership, rounds that commit or are discarded.

>>> run = phalanx.peers.start("job.toml", listen="0.0.0.0:29400")  # doctest: +SKIP
>>> phalanx.peers.invite("runs/job-20261117-120000", "berlin")  # doctest: +SKIP
"""
