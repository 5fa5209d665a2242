#!/bin/bash
declare -A TPS
TPS[small]=1
TPS[large]=2
declare -A PPS=( [small]=1 [large]=1 )
KIND=large
torchrun pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50304 --position-embedding-type rope --micro-batch-size 4 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --bf16 --tensor-model-parallel-size ${TPS[$KIND]} --pipeline-model-parallel-size ${PPS[large]}
