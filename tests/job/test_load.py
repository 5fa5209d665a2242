"""From text to Job: values, origins, and every mistake at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from phalanx.job.load import job_to_dict, job_to_rows, load
from phalanx.job.schema import SECTIONS, Job

Write = Callable[[str], Path]
Complaints = Callable[..., str]

MINIMAL = '[model]\npreset = "deepseek-v3"\n'
EXPLICIT = "[model]\nlayers = 2\nhidden = 64\nheads = 4\nffn = 256\nvocab = 100\n[batch]\nglobal_sequences = 8\n"


def test_a_preset_alone_is_a_job_and_says_where_everything_is_from(write: Write) -> None:
    resolved = load(write(MINIMAL))
    job, origins = resolved.job, resolved.origins
    assert (job.name, job.spec, job.cluster.target) == ("job", "2026.1", "local")
    assert (job.data.sequence, job.batch.global_sequences, job.data.tokens) == (4096, 15360, 14_800_000_000_000)
    assert origins["model.layers"].where == "preset deepseek-v3"
    assert origins["batch.global_tokens"].where == "preset deepseek-v3"
    assert origins["batch.global_sequences"].where == "batch.global_tokens / data.sequence"
    assert origins["optim.lr"].where == "default"
    assert origins["name"].where == "file name"


def test_explicit_shape_derives_what_follows(write: Write) -> None:
    resolved = load(write(EXPLICIT))
    model = resolved.job.model
    assert (model.kv_heads, model.head_dim, model.name) == (4, 16, "job")
    assert resolved.origins["model.head_dim"].where == "model.hidden / model.heads"
    assert resolved.origins["model.layers"].where == "job.toml:2"
    assert resolved.job.data.tokens == "auto"
    assert resolved.job.batch.global_tokens == 8 * 4096


def test_explicit_keys_override_a_preset(write: Write) -> None:
    resolved = load(write('[model]\nvocab = 1000\npreset = "gpt2"\n'))
    assert (resolved.job.model.vocab, resolved.job.model.hidden) == (1000, 768)
    assert resolved.origins["model.vocab"].where == "job.toml:2"


def test_every_setting_has_an_origin(write: Write) -> None:
    rows = job_to_rows(load(write(MINIMAL)))
    assert len({key for key, _, _ in rows}) == len(rows) > 80
    assert all(origin for _, _, origin in rows)


def test_every_section_of_job_is_in_the_table() -> None:
    assert {item.name for item in fields(Job)} == {"spec", "name", "profile", "rules", "waiver", "model", *SECTIONS}


def test_all_sections_are_read(write: Write) -> None:
    text = """
spec = "2026.1"
name = "all"
data = { path = ["a", "b"], tokens = "15T", seed = 7, sequence = 8192 }
cluster = { file = "c.toml" }
[model]
preset = "llama-3-8b"
[batch]
global_tokens = "4M"
micro = 2
ramp = [{ until_tokens = "1B", global_tokens = 2_097_152 }]
[optim]
name = "muon"
betas = [0.9, 0.99]
schedule = "cosine"
[precision]
compute = "fp8"
master_weights = false
[parallel]
framework = "torchtitan"
shard = 0
tensor = 8
sequence_parallel = true
zero = 3
[checkpoint]
interval_s = 600
async = false
[fault]
spares = 2
failures_per_host_day = 0.01
[telemetry]
listen = "[::1]:9090"
[cost]
pue = 1.1
"""
    job = load(write(text)).job
    assert job.data.paths == ("a", "b")
    assert (job.data.tokens, job.batch.global_sequences, job.batch.global_tokens) == (15 * 10**12, 512, 512 * 8192)
    assert job.batch.ramp[0].until_tokens == 10**9
    assert (job.optim.name, job.optim.betas, job.precision.compute) == ("muon", (0.9, 0.99), "fp8")
    assert (job.parallel.shard, job.parallel.tensor, job.parallel.zero, job.parallel.data) == ("auto", 8, 3, "auto")
    assert (job.checkpoint.interval_s, job.checkpoint.asynchronous) == (600.0, False)
    assert (job.fault.spares, job.fault.failures_per_host_day) == (2, 0.01)
    assert (job.telemetry.listen, job.cost.pue, job.cluster.target) == ("[::1]:9090", 1.1, "c.toml")
    dumped = job_to_dict(job)
    kept = {"path": "checkpoints", "interval_s": 600.0, "keep": 3, "async": False, "memory_every": "auto"}
    assert dumped["checkpoint"] == kept


def test_fixed_mode_splits_nothing_by_itself(write: Write) -> None:
    resolved = load(write(MINIMAL + '[parallel]\nmode = "fixed"\ntensor = 2\n'))
    parallel = resolved.job.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.recompute, parallel.data) == (2, 1, "none", "auto")
    assert resolved.origins["parallel.pipeline"].where == 'parallel.mode = "fixed"'


def test_all_mistakes_at_once_in_the_order_of_the_file(complaints: Complaints) -> None:
    text = """\
name = "Bad Name"
colour = 1
"a.b" = 1
[model]
preset = "llama-3-8b"
[data]
tokens = "lots"
[batch]
global_sequence = 512
global_tokens = 4194304
[parallel]
tensor = 6
recompute = "ful"
zero = 4
[optim]
lr = nan
"""
    assert (
        complaints(text)
        == """\
job.toml:1: name = "Bad Name" has the wrong form
  names the run folder
  use lower-case letters, digits, '.', '_' and '-', at most 63, not starting with a sign
job.toml:2: a job file has no key "colour"
  the keys are batch, checkpoint, cluster, comm, cost, data, fault, launch, model, name, numerics, optim, parallel, \
plugins, precision, profile, rules, scale, spec, sync, telemetry, train, waiver
job.toml:3: a job file has no key "a.b"
  the keys are batch, checkpoint, cluster, comm, cost, data, fault, launch, model, name, numerics, optim, parallel, \
plugins, precision, profile, rules, scale, spec, sync, telemetry, train, waiver
job.toml:7: data.tokens = "lots" is text that is not a number such as 512, 8B or 15T
  tokens to train on; "auto" is 20 per parameter
  use a whole number from 1 to 1e18, or "auto"
job.toml:9: section [batch] has no key "global_sequence"
  did you mean "global_sequences"?
job.toml:12: parallel.tensor = 6 does not divide the model's 32 attention heads
  each tensor rank must hold whole heads
  use 4 or 8
job.toml:13: parallel.recompute = "ful" is not a choice
  activations computed again in backward
  did you mean "full"? the choices are "auto", "none", "selective", "full"
job.toml:14: parallel.zero = 4 is above 3
  ZeRO stage: what the shard group shares
  use a whole number from 0 to 3, or "auto"
job.toml:16: optim.lr = nan is not a finite number
  peak learning rate
  use a number above 0 and up to 100"""
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("parallel.tensor = 0", "parallel.tensor = 0 is below 1"),
        ("parallel.tensor = -8", "parallel.tensor = -8 is below 1"),
        ("parallel.tensor = true", "parallel.tensor = true is true/false, not a whole number"),
        ("parallel.tensor = 1.5", "parallel.tensor = 1.5 is not a whole number"),
        ("parallel.tensor = [1]", "parallel.tensor = [1] is a list of 1, not a whole number"),
        ("parallel.tensor = 0x" + "f" * 6000, "parallel.tensor = a number of about 7,224 digits is above 1e7"),
        ("data.tokens = '1.5'", 'data.tokens = "1.5" is not a whole number'),
        ("batch.micro = inf", "batch.micro = inf is not a whole number"),
        ("data.tokens = '1e999'", 'data.tokens = "1e999" is not a whole number'),
        ("fault.detect_s = 0x" + "f" * 6000, "fault.detect_s = a number of about 7,224 digits is above 1e+09"),
        ("fault.detect_s = 1979-05-27", "fault.detect_s = 1979-05-27 is a date or time, not a number"),
        ("cost.pue = 0.5", "cost.pue = 0.5 is below 1"),
        ("precision.master_weights = 'yes'", 'precision.master_weights = "yes" is text, not true or false'),
        ("optim.betas = [0.9, 'x']", 'optim.betas = [0.9, "x"] leaves the range from 0 to below 1'),
        ("telemetry.listen = 'here:99999'", 'telemetry.listen = "here:99999" has the wrong form'),
        ("checkpoint.path = 'a\\u0000b'", "is too long or holds unprintable characters"),
        ("model.norm = 'rsm'", 'did you mean "rms"?'),
        ("model.preset = 'llama-3-8'", 'model.preset = "llama-3-8" is not a known model\n  did you mean "llama-3-8b"?'),
        ("model.preset = 3", "model.preset = 3 is not a known model\n  the known models are phalanx-tiny, gpt2"),
        ("model = 3", "model = 3 is a whole number, not a section"),
        ("parallel = 'auto'", 'parallel = "auto" is text, not a section'),
        ("batch.ramp = 3", "batch.ramp = 3 is a whole number, not a list of tables"),
        ("batch.ramp = [{ until_tokens = 1 }]", "batch.ramp.0 does not say global_tokens"),
        ("batch.ramp = [{ until_tokens = 1, global_tokens = 0, x = 1 }]", 'section [batch.ramp.0] has no key "x"'),
        ("cluster = { spec = 'a', file = 'b' }", "[cluster] gives both a spec and a file"),
        ("batch = { global_tokens = 100000 }", "use 98,304 (24 sequences) or 102,400 (25 sequences)"),
        ("batch = { global_tokens = 8192, global_sequences = 3 }", "is not batch.global_sequences = 3 × data.sequence"),
    ],
)
def test_each_mistake_says_its_value(complaints: Complaints, line: str, message: str) -> None:
    model = "" if line.startswith("model") else 'model.preset = "deepseek-v3"\n'
    rendered = complaints(f"{model}{line}\n".replace("'a\\u0000b'", '"a\\u0000b"'))
    assert message in rendered
    assert f"job.toml:{2 if model else 1}: " in rendered


def test_a_job_without_a_model_or_a_batch_says_what_to_add(complaints: Complaints) -> None:
    assert (
        complaints("")
        == """\
job.toml: [model] does not say layers, hidden, heads, kv_heads, head_dim, ffn, vocab
  the planner counts from the shape
  name a known model, as preset = "llama-3-8b"; or a hf_config = "config.json"; or give these keys
job.toml: [batch] says neither global_tokens nor global_sequences
  the batch is part of the experiment, not of the layout
  add global_tokens = "4M" or global_sequences = 512 under [batch]"""
    )


def test_a_refused_key_does_not_hide_or_invent_other_mistakes(complaints: Complaints) -> None:
    text = 'model = { preset = "gpt2", hidden = -1 }\nparallel = { tensor = 5, context = 3 }\ndata.sequence = "x"\n'
    rendered = complaints(text)
    assert "model.hidden = -1 is below 1" in rendered
    assert "parallel.tensor = 5 does not divide the model's 12 attention heads" in rendered
    assert "parallel.context" not in rendered  # the sequence it must divide is not known


class TestSet:
    def test_toml_values_and_bare_words(self, write: Write) -> None:
        sets = ["parallel.tensor=8", "precision.compute=fp8", "data.tokens=1.5T", "optim.betas=[0.8, 0.9]", "name=x"]
        resolved = load(write(MINIMAL), overrides=sets)
        job = resolved.job
        assert (job.parallel.tensor, job.precision.compute, job.data.tokens) == (8, "fp8", 1_500_000_000_000)
        assert (job.optim.betas, job.name) == ((0.8, 0.9), "x")
        assert resolved.origins["parallel.tensor"].where == "--set parallel.tensor=8"

    def test_the_last_one_wins_and_tables_merge(self, write: Write) -> None:
        sets = ["parallel={tensor=2, zero=1}", "parallel.tensor=4"]
        job = load(write(MINIMAL + "[parallel]\npipeline = 2\n"), overrides=sets).job
        assert (job.parallel.tensor, job.parallel.zero, job.parallel.pipeline) == (4, 1, 2)

    def test_one_of_a_pair_replaces_the_other(self, write: Write) -> None:
        path = write(MINIMAL + '[batch]\nglobal_sequences = 512\n[cluster]\nfile = "c.toml"\n')
        job = load(path, overrides=["batch.global_tokens=8192", "cluster.spec=8xH100:4"]).job
        assert (job.batch.global_sequences, job.cluster.target) == (2, "8xH100:4")

    def test_mistakes_name_the_override(self, complaints: Complaints) -> None:
        rendered = complaints(MINIMAL, "parallel.tensr=4", "parallel.tensor=6", "nonsense", "a.b.c=1", "zero=1")
        assert '--set parallel.tensr=4: section [parallel] has no key "tensr"\n  did you mean "tensor"?' in rendered
        assert "--set parallel.tensor=6: parallel.tensor = 6 does not divide the model's 128" in rendered
        assert '--set "nonsense": is not an override\n  write --set section.key=value' in rendered
        assert '--set "a.b.c=1": is not an override' in rendered
        assert '--set zero=1: a job file has no key "zero"' in rendered

    def test_a_misspelt_section_names_the_flag(self, complaints: Complaints) -> None:
        rendered = complaints(MINIMAL, "paralel.tensor=8")
        assert '--set paralel.tensor=8: a job file has no key "paralel"\n  did you mean "parallel"?' in rendered

    def test_a_batch_with_a_suffix_is_rounded_also_where_it_divides(self, write: Write) -> None:
        for written, sequences in (("512k", 512), ("512000", 500)):
            sets = ["data.sequence=1024", f"batch.global_tokens={written}"]
            batch = load(write(MINIMAL), overrides=sets).job.batch
            assert (batch.global_sequences, batch.global_tokens) == (sequences, sequences * 1024)

    def test_hostile_values_are_text(self, complaints: Complaints) -> None:
        assert "is text that is not a number" in complaints(MINIMAL, "parallel.tensor=" + "[" * 5000)
        assert "is not a choice" in complaints(MINIMAL, "optim.name=adamw\nname = 3")
