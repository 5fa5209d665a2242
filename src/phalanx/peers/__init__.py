"""Peers that train together over slow links: identity, transport, membership, rounds that commit or are discarded."""
