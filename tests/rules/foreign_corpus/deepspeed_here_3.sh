#!/bin/bash
ZERO_STAGE=2
config_json="./ds_config.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": 2,
  "train_batch_size": 512,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "bf16": { "enabled": true }
}
EOT
deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 2 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --bf16 --deepspeed --deepspeed_config $config_json --zero-stage $ZERO_STAGE
