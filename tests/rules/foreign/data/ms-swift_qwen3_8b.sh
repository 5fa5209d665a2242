# Modelled on examples/megatron/sft.sh of modelscope/ms-swift: the distributed optimizer and selective recomputation are
# its defaults.
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=8 \
megatron sft \
    --model Qwen/Qwen3-8B \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-en#500' \
              'swift/self-cognition#500' \
    --tensor_model_parallel_size 2 \
    --sequence_parallel true \
    --micro_batch_size 2 \
    --global_batch_size 64 \
    --torch_dtype bfloat16 \
    --train_iters 1000 \
    --lr 1e-5 \
    --lr_warmup_fraction 0.05 \
    --min_lr 1e-6 \
    --output_dir megatron_output/qwen3 \
    --save_steps 100 \
    --max_length 4096 \
    --no_save_optim false
