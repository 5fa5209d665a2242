"""References, consent, and how Python objects become references that other processes can load."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.errors import UserError
from phalanx.io.user_code import load_user_object
from phalanx.job.load import load
from phalanx.job.plugin_reference import SOURCE_MODULE
from phalanx.job.schema import Job, PluginReferences
from phalanx.plan.inputs import look_at_inputs
from phalanx.train.attach_plugins import attach_plugins
from phalanx.train.callbacks import Callback
from phalanx.train.optim.own_optimizer import OwnOptimizer
from phalanx.train.own_loss import own_loss
from phalanx.train.plugins import (
    ATTRIBUTES,
    load_module,
    load_plugins,
    make_plugin,
    needs_consent,
    refuse_plugins,
)
from phalanx.train.rank_settings import Settings
from phalanx.train.verify.compare import compare_outcomes

EXAMPLES = Path(__file__).parents[2] / "examples"
MINE = Path(__file__).parent / "plugin_files" / "mine.py"


@pytest.fixture(scope="module")
def job() -> Job:
    return load(str(EXAMPLES / "drill.toml")).job


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return "\n".join(problem.render() for problem in caught.value.problems)


class Remembers(Callback):
    def __init__(self, every: int = 2) -> None:
        self.every, self.seen = every, []


class Opens(Callback):
    def __init__(self, path: str) -> None:
        self.file = Path(path)


# ---- references ------------------------------------------------------------------------------------------------------


def test_code_of_a_job_needs_consent_and_an_entry_point_none(job):
    named = PluginReferences(callbacks=(f"{MINE}:Diary",), loss="torch.nn:CrossEntropyLoss", data="web-text")
    assert needs_consent(replace(job, plugins=named)) == ["plugins.callbacks", "plugins.loss"]
    assert needs_consent(replace(job, model=replace(job.model, module="net.py:build"))) == ["model.module"]
    assert needs_consent(replace(job, model=replace(job.model, module="tiny-net"))) == []
    said = refusal(load_plugins, replace(job, plugins=named), allow_code=False)
    assert "is code that this job wants to run" in said
    assert "give --allow-code" in said
    lines = replace(job, plugins=PluginReferences(source=("import os",)))
    assert "1 line of Python" in refusal(load_plugins, lines, allow_code=False)
    assert "no installed package offers 'web-text' as an entry point of phalanx.datasets" in refusal(
        make_plugin, "web-text", kind="data", allow_code=False
    )


def test_an_entry_point_is_found(job, tmp_path, monkeypatch):
    info = tmp_path / "lamp-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lamp\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[phalanx.callbacks]\nlamp = lamp:Lamp\n[phalanx.models]\nlamp-net = lamp:Lamp\n"
    )
    (tmp_path / "lamp.py").write_text("import phalanx.train.callbacks as c\nclass Lamp(c.Callback):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = replace(job, plugins=PluginReferences(callbacks=("lamp",)))
    (found,) = load_plugins(plugins, allow_code=False).callbacks
    assert type(found).__name__ == "Lamp"
    assert attach_plugins(job, callbacks=["lamp"]).plugins == plugins.plugins
    assert "did you mean lamp?" in refusal(attach_plugins, job, callbacks=["lamb"])
    shape = attach_plugins(job, model='lamp-net {"width": 8}').model
    assert (shape.module, shape.arguments) == ("lamp-net", '{"width": 8}')


def test_what_cannot_be_loaded_is_said(job):
    def said(text: str) -> str:
        return refusal(make_plugin, text, kind="callbacks", allow_code=True)

    assert "did you mean Diary?" in said(f"{MINE}:Diery")
    assert "there is no such file" in said("nowhere.py:Diary")
    assert "ends in something that is not JSON" in said(f"{MINE}:Diary {{every: 2}}")
    assert "names no code" in said("two words")
    assert "unexpected keyword argument 'colour'" in said(f'{MINE}:Diary {{"path": "x", "colour": 1}}')
    lists = replace(job, plugins=PluginReferences(callbacks=("builtins:dict",)))
    assert "made a dict" in refusal(load_plugins, lists, allow_code=True)


# ---- objects that travel ---------------------------------------------------------------------------------------------


def test_objects_become_references_that_give_the_same_object(job):
    mine = load_module(str(MINE))
    attached = attach_plugins(
        job,
        callbacks=[Remembers(every=5), f"{MINE}:Breaks"],
        loss=functools.partial(mine.smooth_loss, smoothing=0.3),
        optimizer=functools.partial(torch.optim.SGD, momentum=0.5),
        metrics=[mine.accuracy],
    )
    first, second = attached.plugins.callbacks
    assert (first, second) == (
        f'{Path(__file__).resolve()}:Remembers {{"{ATTRIBUTES}": {{"every": 5, "seen": []}}}}',
        f"{MINE}:Breaks",
    )
    assert attached.plugins.optimizer == 'torch.optim.sgd:SGD {"momentum": 0.5}'
    assert attached.plugins.loss == f'{MINE}:smooth_loss {{"smoothing": 0.3}}'
    assert attached.plugins.source == ()
    remade = make_plugin(first, kind="callbacks", allow_code=True)
    assert (type(remade).__name__, vars(remade)) == ("Remembers", {"every": 5, "seen": []})


SCRIPT = """
import json, math
import numpy as np
from phalanx.io.user_code import load_user_object
from phalanx.job.load import load
from phalanx.train.callbacks import Callback
from phalanx.plan.inputs import look_at_inputs
from phalanx.train.attach_plugins import attach_plugins

FACTOR = 3
RUNNING = open(__file__)

def scaled(value):
    return math.floor(FACTOR * np.float64(value))

class Lamp(Callback):
    def __init__(self, every):
        self.every = every
    def on_start(self, training):
        return scaled(self.every)

class Reads(Callback):
    def on_start(self, training):
        return RUNNING.read()

job = load(JOB).job
print(json.dumps(attach_plugins(job, callbacks=[Lamp(2)]).plugins.source))
for wrong in (Reads, lambda training: None):
    try:
        attach_plugins(job, callbacks=[wrong])
    except Exception as error:
        print(error)
"""


def test_a_class_of_a_script_travels_as_its_source_with_what_it_uses(job, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("JOB", repr(str(EXAMPLES / "drill.toml"))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120)
    source, *refused = done.stdout.splitlines()
    plugins = PluginReferences(source=tuple(json.loads(source)), callbacks=(f'{SOURCE_MODULE}:Lamp {{"every": 2}}',))
    (lamp,) = load_plugins(replace(job, plugins=plugins), allow_code=True).callbacks
    assert lamp.on_start(None) == 6
    assert "callbacks: Reads: uses the variable RUNNING, a TextIOWrapper" in refused[0]
    assert "is a lambda" in "\n".join(refused)


def test_what_cannot_travel_is_refused(job):
    class Inside(Callback):
        pass

    assert "is defined inside a function" in refusal(attach_plugins, job, callbacks=[Inside])
    assert "an instance whose file cannot be written as JSON" in refusal(attach_plugins, job, callbacks=[Opens("x")])
    assert "use keyword arguments" in refusal(
        attach_plugins, job, loss=functools.partial(torch.nn.functional.mse_loss, 1)
    )
    with MINE.open() as file:
        for wrong, kind in ((file, "TextIOWrapper"), (3, "int"), (torch.nn.ReLU(), "ReLU")):
            said = refusal(attach_plugins, job, callbacks=[wrong])
            assert f"is of type {kind}" in said
            assert "subclass of phalanx.Callback" in said
        assert "is of type TextIOWrapper" in refusal(attach_plugins, job, data=file)
    assert "is the class dict" in refusal(attach_plugins, job, callbacks=[dict])
    for key in ("model", "loss", "optimizer", "data"):
        assert f"{key}: 3: is of type int" in refusal(attach_plugins, job, **{key: 3})
    for single in (Remembers(), "mine.py:Breaks"):
        assert "give a list, also of one: callbacks=[…]" in refusal(attach_plugins, job, callbacks=single)


def test_references_start_in_the_folder_of_the_caller_and_must_be_there(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "here.py"
    file.write_text("def build(shape): ...\nclass Stream: ...\n")
    found = attach_plugins(job, model="here.py:build", data='here.py:Stream {"log": "x"}')
    assert (found.model.module, found.plugins.data) == (f"{file}:build", f'{file}:Stream {{"log": "x"}}')
    assert "there is no file" in refusal(attach_plugins, job, loss="nofile.py:X")
    assert "here.py has no Nope" in refusal(attach_plugins, job, model="here.py:Nope")
    assert "no installed package offers 'web-text'" in refusal(attach_plugins, job, data="web-text")
    carried = replace(job, model=replace(job.model, module=f"{SOURCE_MODULE}:Net"))
    found = look_at_inputs(carried, tmp_path)
    assert not any(SOURCE_MODULE in one.render() for one in found.missing), "the job carries it; nothing to install"


# ---- loss and optimizer ----------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_sum_over_valid_tokens_is_refused(trial):
    def settings(name: str) -> Settings:
        return replace(trial().settings, loss=f"{MINE}:{name}", allow_code=True)

    assert own_loss(settings("smooth_loss"), 16) is not None
    said = refusal(own_loss, settings("mean_loss"), 16)
    assert "mine.py:mean_loss is 3." in said
    assert "for a batch twice, where a sum over the valid tokens is" in said
    layout = replace(trial().settings.layout, tensor=2)
    said = refusal(refuse_plugins, PluginReferences(loss="x:y"), layout, loss_parallel=True)
    assert "parallel.tensor = 2 with parallel.loss_parallel" in said


def test_own_loss_and_optimizer_compute_the_same_on_two_ranks(trial, once):
    own = {"loss": f"{MINE}:smooth_loss", "optimizer": f"{MINE}:SignDescent", "allow_code": True, "lr": 1e-3}
    alone, plain = once(trial(**own)), once(trial(lr=1e-3))
    found = compare_outcomes(once(trial(data=2, shard=2, zero=3, **own)), alone)
    assert found.first is None, found.first.render()
    assert alone.losses[0] != plain.losses[0]


def test_an_optimizer_that_looks_at_whole_tensors_is_refused_where_they_are_split(trial, once):
    wrong = {"optimizer": f"{MINE}:NormDescent", "allow_code": True}
    with pytest.raises(UserError, match="NormDescent would update"):
        once(trial(data=2, shard=2, zero=3, **wrong))


def test_an_optimizer_goes_on_from_its_state_as_if_nothing_had_been(trial):
    from phalanx.job.schema import Optim
    from phalanx.train.parallel.tensor_shard import TensorShard

    def shard() -> TensorShard:
        tensor = torch.arange(6.0).reshape(2, 3) / 7
        return TensorShard(name="w", tensor=tensor, shape=(2, 3), start=(0, 0), replicas=1, owner=True, groups={})

    def optimizer(one: TensorShard) -> OwnOptimizer:
        return OwnOptimizer([one], "torch.optim:AdamW", optim=Optim(), decays=lambda name: True, allow_code=True)

    whole, halved = shard(), shard()
    through, first = optimizer(whole), optimizer(halved)
    for step in range(6):
        if step == 3:
            second = optimizer(halved)
            second.load({one.name: one.tensor for one in first.state()}, first.steps)
            first = second
        for one, update in ((whole, through), (halved, first)):
            one.tensor.grad = torch.full_like(one.tensor, 0.5 + step)
            update.step(1e-2)
    assert torch.equal(whole.tensor, halved.tensor)
    assert [one.name for one in through.state()] == ["w#exp_avg", "w#exp_avg_sq"]


def test_a_file_may_import_the_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_mine.py").write_text("FACTOR = 3\n")
    (tmp_path / "scaled.py").write_text("from beside_mine import FACTOR\ndef loss(x, y):\n    return FACTOR\n")
    assert load_module(str(tmp_path / "scaled.py")).loss(None, None) == 3
    assert load_user_object("scaled.py:loss", folder=tmp_path)(None, None) == 3
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "beside_mine.py").write_text("FACTOR = 5\n")
    (tmp_path / "b" / "scaled.py").write_text((tmp_path / "scaled.py").read_text())
    assert load_user_object("scaled.py:loss", folder=tmp_path / "b")(None, None) == 5, "another file of that name"
    (tmp_path / "beside_mine.py").write_text("FACTOR = 7  # edited\n")
    assert load_user_object("scaled.py:loss", folder=tmp_path)(None, None) == 7
