#!/bin/bash
ALL_ARGS=(--fp16 --tensor-model-parallel-size 2)
torchrun pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50304 --position-embedding-type rope --micro-batch-size 4 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --bf16 "${ALL_ARGS[@]:1:2}"
