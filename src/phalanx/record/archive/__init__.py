"""Reading a run while it grows and afterwards: an index over its events, curves and meshes, and its damage."""
