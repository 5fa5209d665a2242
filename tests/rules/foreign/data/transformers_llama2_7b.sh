#!/bin/bash
# Modelled on scripts/finetune.sh of haotian-liu/LLaVA: the JSON is named from the folder above.
deepspeed --num_gpus 8 train_mem.py \
    --deepspeed ./data/json/deepspeed_zero2_trainer.json \
    --model_name_or_path meta-llama/Llama-2-7b-hf \
    --bf16 True \
    --output_dir ./checkpoints/out \
    --max_steps 5000 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --save_steps 500 \
    --learning_rate 2e-5 \
    --warmup_steps 100 \
    --lr_scheduler_type "cosine" \
    --model_max_length 2048 \
    --gradient_checkpointing True
