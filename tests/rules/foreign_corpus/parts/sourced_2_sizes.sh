TP=8
EXTRA=(--use-distributed-optimizer)
