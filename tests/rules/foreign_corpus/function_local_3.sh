#!/bin/bash
TP=4
set_small() { local TP=99; OTHER=1; }
set_small
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 50304 --position-embedding-type rope --micro-batch-size 2 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --bf16 --tensor-model-parallel-size $TP
