# Modelled on Megatron-Bridge's recipes/llama/h100/llama3.py.
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.core.distributed import DistributedDataParallelConfig


def _pretrain_common() -> ConfigContainer:
    return ConfigContainer(
        model=None,
        train=TrainingConfig(train_iters=300000, global_batch_size=32, micro_batch_size=2),
        optimizer=OptimizerConfig(optimizer="adam", lr=3e-4, weight_decay=0.1),
        scheduler=SchedulerConfig(lr_warmup_iters=500, lr_decay_style="cosine"),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        checkpoint=CheckpointConfig(save_interval=500, save="/ckpt", ckpt_format="torch_dist"),
        mixed_precision="bf16_mixed",
    )


def llama3_70b_pretrain_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-70B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.pipeline_dtype = torch.bfloat16
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    return cfg
