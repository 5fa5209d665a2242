"""The examples of docs/models.md, run as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from phalanx.job.load import load
from phalanx.train.models.protocol import build_model

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_example_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)
    model, again = names["model"], names["again"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(again, torch.nn.Module)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert torch.equal(model(tokens), again(tokens))


def test_the_example_of_an_own_network(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(blocks("python")[1])
    (tmp_path / "job.toml").write_text(blocks("toml")[0] + "[batch]\nglobal_sequences = 8\n")
    shape = load(tmp_path / "job.toml").job.model
    model = build_model(shape, allow_code=True, folder=tmp_path)
    sys.modules.pop("phalanx_module_my_model")
    logits = model(torch.zeros(2, 5, dtype=torch.int64))
    assert logits.shape == (2, 5, 320)
    assert model.layers[0].drop.p == 0.1  # type: ignore[index,union-attr]
