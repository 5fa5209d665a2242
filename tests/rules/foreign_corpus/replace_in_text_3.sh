#!/bin/bash
ARGS="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 50304 --position-embedding-type rope --micro-batch-size 2 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --bf16 ${ARGS/size 1/size 4}
