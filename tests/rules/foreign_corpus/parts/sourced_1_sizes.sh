TP=2
EXTRA=(--use-distributed-optimizer)
