"""Training with peers on slow links: modes, data, state for newcomers, and the process of a peer."""
