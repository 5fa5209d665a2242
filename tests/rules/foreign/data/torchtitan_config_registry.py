# Modelled on torchtitan's models/llama3/config_registry.py of August 2026.
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

CONTEXT = 8192


def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=1 * CONTEXT, max_context_length=CONTEXT, steps=1000
        ),
        checkpoint=CheckpointManager.Config(enable=True, interval=250),
        activation_checkpoint=SelectiveAC.Config(),
    )


def llama3_405b() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("405B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
    config.training.num_tokens_per_microbatch_per_dp_rank = 2 * CONTEXT
    config.parallelism = ParallelismConfig(tensor_parallel_degree=8)
    config.compile = CompileConfig(enable=True)
    config.activation_checkpoint = FullAC.Config()
    return config
