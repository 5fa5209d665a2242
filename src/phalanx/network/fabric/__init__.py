"""Fabrics: the switches and cables that join N network ports, their cost, and the loss when one fails."""
