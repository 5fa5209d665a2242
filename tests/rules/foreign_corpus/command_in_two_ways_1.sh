PROFILE=(--profile --profile-ranks 0 1)
APP="python -u pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50304 --position-embedding-type rope --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --micro-batch-size 4 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --bf16 --use-distributed-optimizer"
if [[ $profiling == "torch" ]]; then
    APP+=" ${PROFILE[@]}"
elif [[ $profiling == "hip" ]]; then
    APP="hipprof -d out ${APP}"
fi
${APP}
