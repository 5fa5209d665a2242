"""Shapes of models that recipes and configurations only name: right, or unknown and listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.job.model import ModelShape, known_presets
from phalanx.rules.foreign.convert import ConvertedConfig, convert_config
from phalanx.rules.foreign.known_models import known_models, model_of_hugging_face

NEMO = """\
from dataclasses import dataclass, field
import nemo_run as run
from nemo.collections import llm
from nemo.collections.llm.api import pretrain

{classes}
def pretrain_recipe() -> run.Partial:
    return run.Partial(
        pretrain,
        model=run.Config(llm.LlamaModel, config=run.Config({config})),
        data=run.Config(llm.MockDataModule, seq_length=4096, global_batch_size=512, micro_batch_size=1),
    )
"""
OLMO = """\
from olmo_core.internal.experiment import ExperimentConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.train.train_module import TransformerExpertParallelConfig, TransformerTrainModuleConfig

def build_config() -> ExperimentConfig:
    model = TransformerConfig.{factory}
    {then}
    return ExperimentConfig(model=model, train_module=TransformerTrainModuleConfig(max_sequence_length=4096, {more}))
"""


def shape_of(found: ConvertedConfig) -> tuple[int, int, int, int, int] | None:
    """Layers, hidden, heads, key-value heads, feed-forward; None where the model is not known."""
    if any("which model is trained" in one.what or "num_layers" in one.what for one in found.missing):
        return None
    model = found.resolved.job.model
    return model.layers, model.hidden, model.heads, model.kv_heads, model.ffn


def test_every_known_model_has_a_shape_and_is_found_by_its_own_name_only() -> None:
    for one in known_models():
        assert one.preset in known_presets() if one.preset else ModelShape(name=one.name, **one.shape)  # type: ignore[arg-type]
    names = [name for one in known_models() for name in (*one.nemo, *one.torchtitan)]
    assert len(names) == len(set(names))
    found = model_of_hugging_face("Qwen/Qwen2.5-Coder-7B-Instruct")
    assert found is not None
    assert found.shape["hidden"] == 3584
    others = ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-80B", "llava-llama-2-7b", "deepseek-ai/DeepSeek-V3.2")
    assert [model_of_hugging_face(name) for name in others] == [None] * 4


@pytest.mark.parametrize(
    ("classes", "config", "shape"),
    [
        ("", "llm.Llama32Config1B", (16, 2048, 32, 8, 8192)),
        ("", "llm.Qwen25Config7B, num_layers=4", (4, 3584, 28, 4, 18944)),
        ("@dataclass\nclass Short(llm.Llama32Config1B):\n    num_layers: int = 8\n", "Short", (8, 2048, 32, 8, 8192)),
        ("@dataclass\nclass Mixed(llm.SSMConfig):\n    num_layers: int = 8\n", "Mixed", None),
        (
            "class Uneven(llm.Llama32Config1B, llm.HeterogeneousTransformerConfig):\n    pass\n",
            "Uneven",
            None,
        ),
        ("", "llm.SomebodysConfig5B", None),
    ],
)
def test_a_class_of_nemo_has_its_shape_and_what_the_recipe_changes(
    tmp_path: Path, classes: str, config: str, shape: tuple[int, ...] | None
) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(NEMO.format(classes=classes, config=config))
    found = convert_config(path, "nemo")
    assert shape_of(found) == shape
    assert found.resolved.job.data.sequence == 4096


def test_a_class_in_the_same_repository_is_read_from_its_source(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    package = tmp_path / "ours"
    package.mkdir()
    (package / "__init__.py").write_text("from ours.models import Own3B\n")
    (package / "models.py").write_text(
        "from dataclasses import dataclass, field\nfrom nemo.collections.llm import GPTConfig\nWIDE = 2048\n"
        "@dataclass\nclass Base(GPTConfig):\n    num_attention_heads: int = 16\n    num_query_groups: int = 4\n"
        "    seq_length: int = 99\n"
        "@dataclass\nclass Own3B(Base):\n    num_layers: int = 6\n    hidden_size: int = WIDE\n"
        "    ffn_hidden_size: int = field(default=4 * WIDE)\n    vocab_size: int = 32000\n"
    )
    path = package / "recipe.py"
    path.write_text(NEMO.format(classes="from ours import Own3B\n", config="Own3B"))
    found = convert_config(path, "nemo")
    assert shape_of(found) == (6, 2048, 16, 4, 8192)
    assert found.resolved.job.data.sequence == 4096  # of the data, not the default of the class


@pytest.mark.parametrize(
    ("factory", "then", "shape"),
    [
        ("olmo2_7B(vocab_size=100352)", "", (32, 4096, 32, 32, 11008)),
        ("olmo3_32B(vocab_size=100352, n_layers=8)", "", (8, 5120, 40, 8, 27648)),
        ("llama3_8B(vocab_size=100352)", "model = model.with_rope_scaling(1)", (32, 4096, 32, 8, 14336)),
        ("llama_like(d_model=1024, n_layers=4, n_heads=8, vocab_size=100352)", "", (4, 1024, 8, 8, 2816)),
        ("llama_like(d_model=WIDE, n_layers=4, n_heads=8, vocab_size=100352)", "", None),
        ("olmo3_7B(vocab_size=100352)", "model.block_pattern = ['gdn', 'attn']", None),
        ("somebodys_9B(vocab_size=100352)", "", None),
    ],
)
def test_a_factory_of_olmo_core_has_its_shape(
    tmp_path: Path, factory: str, then: str, shape: tuple[int, ...] | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(OLMO.format(factory=factory, then=then or "pass", more=""))
    found = convert_config(path, "olmo-core")
    assert shape_of(found) == shape
    if shape:
        assert found.resolved.job.model.vocab == 100352  # of the script, not of Llama 3


def test_as_many_expert_ranks_as_there_are_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    more = "ep_config=TransformerExpertParallelConfig(degree=-1)"
    path.write_text(OLMO.format(factory="olmoe_1B_7B(vocab_size=100352)", then="pass", more=more))
    found = convert_config(path, "olmo-core")
    assert "parallel.expert" in found.unknown
    assert "parallel.tensor" not in found.unknown
