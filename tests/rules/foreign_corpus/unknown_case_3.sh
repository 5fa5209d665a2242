#!/bin/bash
case "$MODEL_NAME" in
  7b) TP=1; AC=--recompute-activations ;;
  70b) TP=8; AC= ;;
  *) TP=4; AC= ;;
esac
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 50304 --position-embedding-type rope --micro-batch-size 2 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --bf16 --tensor-model-parallel-size $TP $AC
