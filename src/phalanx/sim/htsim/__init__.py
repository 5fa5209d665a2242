"""Read and write files of the htsim family of simulators (Broadcom/csg-htsim, ultraethernet/uet-htsim)."""
