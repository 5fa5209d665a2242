#!/bin/bash
LAST=0
for i in $(seq 1 4); do LAST=$i; done
torchrun pretrain_gpt.py --num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 50304 --position-embedding-type rope --micro-batch-size 1 --global-batch-size 1536 --train-iters 1000 --lr 1e-4 --bf16 --pipeline-model-parallel-size $LAST
