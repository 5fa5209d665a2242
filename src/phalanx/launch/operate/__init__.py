"""The operator's side of a cluster: teams and their quotas, and node health."""
