"""The examples of docs/plugins.md, run as they stand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from phalanx.job.load import load
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.train.data.batches import IGNORED, BatchPlan
from phalanx.train.data.sources import OwnBatches
from phalanx.train.plugins import LoadedPlugins, absolute_references, load_plugins
from phalanx.train.verify.compare import compare_outcomes

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
DRILL = (Path(__file__).parents[2] / "examples" / "drill.toml").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    (folder / "my_plugins.py").write_text("\n\n".join(blocks("python")))
    (folder / "job.toml").write_text(DRILL + blocks("toml")[0])
    job = load(folder / "job.toml").job
    return replace(job, plugins=absolute_references(job.plugins, folder))


@pytest.fixture(scope="module")
def plugins(job) -> LoadedPlugins:
    return load_plugins(job, allow_code=True)


def test_the_callback_prints_and_stops_and_keeps_its_state(plugins, capsys):
    (log,) = plugins.callbacks
    stopped = []
    training = SimpleNamespace(rank=0, stop=lambda: stopped.append(True))
    for step, loss in enumerate([4.0, 2.0, 3.0, 3.0]):
        log.on_step_end(training, SimpleNamespace(step=step, result=SimpleNamespace(loss=loss)))
    assert capsys.readouterr().out == "step 1: 3.000\nstep 3: 3.000\n"
    assert stopped == [True]
    assert log.state_dict() == {"losses": [], "best": 3.0}


def test_loss_and_optimizer_train_the_same_on_two_ranks(job, trial, once):
    own = {"loss": job.plugins.loss, "optimizer": job.plugins.optimizer, "allow_code": True, "lr": 1e-3}
    found = compare_outcomes(once(trial(data=2, shard=2, zero=3, **own)), once(trial(**own)))
    assert found.first is None, found.first.render()


def test_the_metric(plugins):
    logits = torch.eye(4)[None]
    assert int(plugins.metrics["accuracy"](logits, torch.tensor([[0, 1, 3, IGNORED]]))) == 2


def test_the_stream_is_dealt_in_order_and_goes_on_where_it_was(job, plugins):
    plan = BatchPlan.of(job.batch, sequence=64, tokens=4 * 1024)

    def open_it(data, rank: int, ranks: int) -> OwnBatches:
        dealing = BatchDeal(data_ranks=ranks, micro=2, rounds=1, powers=False)
        return OwnBatches(data, plan, dealing, sequence=64, vocab=512, data_rank=rank, seed=0, name="x")

    def fresh():
        return load_plugins(job, allow_code=True).data

    whole, first, second = open_it(plugins.data, 0, 1), open_it(fresh(), 0, 2), open_it(fresh(), 1, 2)
    for step in range(3):
        tokens, targets = whole.get(step)
        halves = [one.get(step) for one in (first, second)]
        assert np.array_equal(tokens, np.concatenate([rows for rows, _ in halves]))
        assert np.array_equal(targets, np.concatenate([rows for _, rows in halves]))
        assert tokens[0, 0] == 16 * step + 1
    position = whole.position(3)
    assert position == {"passes": 0, "items": 48, "state": {"position": 48}}  # whatever was read ahead
    again = open_it(fresh(), 0, 1)
    again.restore_position(position)
    assert again.get(3)[0][0, 0] == 49
    for one in (whole, first, second, again):
        one.close()


def test_items_that_are_short_or_labelled_or_wrong():
    def batches(items, **changes) -> OwnBatches:
        plan = SimpleNamespace(at=lambda step: (step * 2, 2), steps=9)
        dealing = BatchDeal(data_ranks=1, micro=1, rounds=1, powers=False)
        given = {"sequence": 4, "vocab": 10, "data_rank": 0, "seed": 0, "name": "x", **changes}
        return OwnBatches(items, plan, dealing, **given)

    def said(items) -> str:
        with pytest.raises(Exception) as caught:
            batches(items).get(0)
        return str(caught.value)

    found = batches(iter([[1, 2, 3], {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, 3, 4, 5]}]))
    tokens, targets = found.get(0)
    assert tokens.tolist() == [[1, 2, 3, 0], [1, 2, 3, 4]]
    assert targets.tolist() == [[2, 3, IGNORED, IGNORED], [IGNORED, 3, 4, 5]]
    found.close()
    assert "an item of 6 tokens, and data.sequence = 4" in said([[1] * 6])
    assert "a token numbered 11, and model.vocab = 10" in said([[1, 11]])
    assert 'no "input_ids"' in said([{"text": "a"}])
    assert "gives nothing the second time" in said(iter([[1, 2]]))
    assert "is empty" in said([])
    assert "neither a dataset" in said(7)
