"""A run read back while it grows and after: an index over its events, curves and meshes, and what is damaged."""
