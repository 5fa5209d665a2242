"""Files of the htsim family of simulators (Broadcom/csg-htsim, ultraethernet/uet-htsim): read and written."""
