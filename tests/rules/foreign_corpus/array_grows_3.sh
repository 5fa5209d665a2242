#!/bin/bash
ARGS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 50304 --position-embedding-type rope --micro-batch-size 2 --global-batch-size 512 --train-iters 1000 --lr 1e-4)
ARGS+=(--tensor-model-parallel-size 4)
ARGS+=(--pipeline-model-parallel-size "2" --bf16)
torchrun pretrain_gpt.py "${ARGS[@]}"
