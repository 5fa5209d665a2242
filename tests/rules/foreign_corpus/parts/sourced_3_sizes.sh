TP=4
EXTRA=(--use-distributed-optimizer)
