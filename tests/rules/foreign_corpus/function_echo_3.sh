#!/bin/bash
twice() { echo $(( $1 * 2 )); }
GBS=$(twice 512)
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 2 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --bf16 --global-batch-size $GBS
