"""The packet engine: simulation in slots, with queues, marks, trimming, path states and a congestion window."""
