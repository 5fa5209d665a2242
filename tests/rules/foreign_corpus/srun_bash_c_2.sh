#!/bin/bash
#SBATCH --nodes=16
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes 16"
export CMD="pretrain_gpt.py --num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --context-parallel-size 1 --micro-batch-size 1 --global-batch-size 1536 --train-iters 1000 --lr 1e-4 --bf16 --deepspeed --zero-stage 0"
srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee -a log.txt
