"""Packets in slots: queues, marks, trimming, path states and a congestion window, healthy and broken."""
