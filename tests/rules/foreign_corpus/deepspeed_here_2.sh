#!/bin/bash
ZERO_STAGE=0
config_json="./ds_config.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": 1,
  "train_batch_size": 1536,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "bf16": { "enabled": true }
}
EOT
deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --context-parallel-size 1 --micro-batch-size 1 --global-batch-size 1536 --train-iters 1000 --lr 1e-4 --bf16 --deepspeed --deepspeed_config $config_json --zero-stage $ZERO_STAGE
