"""Peers that train together over slow links: identity, transport, membership, and rounds that commit or are discarded."""
