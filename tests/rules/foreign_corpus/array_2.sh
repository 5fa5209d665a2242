#!/bin/bash
MODEL_ARGS=(
  --num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 50304 --position-embedding-type rope
)
PARALLEL_ARGS=(
  # the split
  --tensor-model-parallel-size 8
  --pipeline-model-parallel-size 4   # stages
  --use-distributed-optimizer
)
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} "${PARALLEL_ARGS[@]}" --micro-batch-size 1 --global-batch-size 1536 --train-iters 1000 --lr 1e-4 --bf16
