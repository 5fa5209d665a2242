"""The training specification as rules a program checks, and what they say of a job, a plan or a run."""
