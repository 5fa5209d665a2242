"""Training with peers over slow links: exchange modes, data, state for newcomers, and a peer's process."""
