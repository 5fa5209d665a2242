for para in $*; do
    if [[ $para == --bind=* ]]; then
        bind=${para#*=}
    fi
done
RANK=$OMPI_COMM_WORLD_LOCAL_RANK
APP="python -u pretrain_gpt.py --num-layers 32 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --bf16 --use-distributed-optimizer"
${bind} ${RANK} ${APP}
