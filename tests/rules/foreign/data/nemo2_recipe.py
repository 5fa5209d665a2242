# Modelled on NeMo 2's collections/llm/recipes/llama3_8b.py.
import nemo_run as run
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections.llm.api import pretrain
from nemo.collections.llm.gpt.data.mock import MockDataModule
from nemo.collections.llm.gpt.model.llama import Llama3Config8B, LlamaModel
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision


def trainer(tensor_parallelism: int = 1, context_parallelism: int = 2, num_nodes: int = 1) -> run.Config[nl.Trainer]:
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        context_parallel_size=context_parallelism,
        ddp=run.Config(DistributedDataParallelConfig, grad_reduce_in_fp32=True, overlap_grad_reduce=True),
    )
    return run.Config(
        nl.Trainer,
        devices=8,
        num_nodes=num_nodes,
        max_steps=100000,
        plugins=run.Config(MegatronMixedPrecision, precision="bf16-mixed", grad_reduce_in_fp32=True),
        strategy=strategy,
    )


@run.cli.factory(target=pretrain, name="llama3_8b")
def pretrain_recipe(num_nodes: int = 1, fast: bool = False) -> run.Partial:
    recipe = run.Partial(
        pretrain,
        model=run.Config(LlamaModel, config=run.Config(Llama3Config8B)),
        trainer=trainer(num_nodes=num_nodes),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
        optim=run.Config(
            MegatronOptimizerModule,
            config=run.Config(OptimizerConfig, optimizer="adam", lr=3e-4, use_distributed_optimizer=True),
            lr_scheduler=run.Config(CosineAnnealingScheduler, warmup_steps=2000, min_lr=3e-5),
        ),
    )
    if fast:
        recipe.trainer.strategy.tensor_model_parallel_size = 8
    return recipe
