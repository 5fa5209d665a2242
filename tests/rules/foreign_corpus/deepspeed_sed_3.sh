#!/bin/bash
sed "s/STAGE/2/" parts/deepspeed_sed_3_template.json | sed "s/MICRO/2/" > made.json
deepspeed pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 2 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --bf16 --deepspeed --deepspeed_config made.json --zero-stage 2
