"""The training specification: rules that a program checks against a job, a plan or a run."""
