"""Maximum counts that files and commands may request: a larger count is a typing mistake.

Each limit is at least ten times the largest published value, and small enough that the loop, array or search it sizes
ends. Limits of file and text sizes are next to their readers.
"""

from __future__ import annotations

# Models.
MAX_LAYERS = 10_000  # DeepNet trained 1,000 (arXiv:2203.00555), Llama 3.1 405B has 126; planning loops over them
MAX_WIDTH = 2**24  # hidden, ffn and ranks of MLA's projections; Llama 3.1 405B's ffn is 53,248
MAX_HEADS = 2**16  # 144 in the largest published models
MAX_HEAD_DIM = 2**16  # 576 in DeepSeek-V3's latent attention
MAX_EXPERTS = 2**24  # a million in arXiv:2407.04153
MAX_VOCAB = 2**24  # 262,144 in Gemma 3
MAX_SEQUENCE = 10**9  # tokens; 10 million in Llama 4 Scout, 100 million in LTM-2-mini

# Training.
MAX_COUNT = 10**9  # any count without its own limit; products of two stay inside 64 bits
MAX_TOKENS = 10**18
MAX_SEQUENCES = 10**12  # of one optimizer step
MAX_STEPS = 10**9  # of one run; 1 to 2 million are usual
MAX_SECONDS = 10**9  # 31 years
MAX_KEPT = 10**6  # checkpoints of one run
MAX_WORKERS = 4096  # processes that one command starts on one machine; the largest has 1,024 hardware threads

# Clusters.
MAX_RANKS = 10**7  # of a job and of a cluster; 76 times the 131,072 GPUs that Phalanx is made for
MAX_RANKS_PER_GPU = 64
MAX_SITES = 1000
MAX_PEERS = 10_000

# Simulation and search.
MAX_SEED = 2**63 - 1
MAX_INNER_STEPS = 10_000  # of a peer between two exchanges; 500 in DiLoCo
MAX_SHOWN_ROWS = 10_000  # of a table that a command prints

# Limit of any number on the command line, before the verb's own limits; whole numbers stay inside 64 bits.
MAX_OPTION = 2**63 - 1
