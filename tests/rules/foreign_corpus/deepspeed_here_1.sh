#!/bin/bash
ZERO_STAGE=1
config_json="./ds_config.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": 4,
  "train_batch_size": 256,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "bf16": { "enabled": true }
}
EOT
deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1 --micro-batch-size 4 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --bf16 --deepspeed --deepspeed_config $config_json --zero-stage $ZERO_STAGE
