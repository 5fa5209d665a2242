#!/bin/bash
#SBATCH --nodes=2
GPUS_PER_NODE=8
NNODES=2
PP_SIZE=1
TP_SIZE=2
MICRO_BATCH_SIZE=4
GLOBAL_BATCH_SIZE=256
ZERO_STAGE=0
config_json="./ds_config.$SLURM_JOBID.json"
cat <<EOT > $config_json
{"train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE, "zero_optimization": {"stage": $ZERO_STAGE}, "bf16": {"enabled": true}}
EOT
GPT_ARGS=" \
  --pp-partition-method 'type:transformer|embedding' \
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \
  --micro-batch-size $MICRO_BATCH_SIZE --rampup-batch-size 16 16 9_765_625 --global-batch-size $GLOBAL_BATCH_SIZE \
  --train-samples 220000000 --position-embedding-type alibi --embed-layernorm --pad-vocab-size-to 250880 --bf16 --checkpoint-activations \
  "
DEEPSPEED_ARGS=" \
  --deepspeed --deepspeed_config ${config_json} --zero-stage ${ZERO_STAGE} --deepspeed-activation-checkpointing "
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --max_restarts 0"
export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE $GPT_ARGS $DEEPSPEED_ARGS "
echo $CMD
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt
