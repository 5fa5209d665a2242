"""Files a job names against the job and each other; datasets and weights are written by hand, as small as they go."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import UserError
from phalanx.io.user_code import load_user_object
from phalanx.job.dataset import DatasetManifest, Shard, Source
from phalanx.job.load import load
from phalanx.plan.inputs import InputFindings, look_at_inputs, passes_of

WORDS = ("<end>", *"abcdefgh")
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = {**SHAPE, "model_type": "llama", "intermediate_size": 64, "vocab_size": 64, "rms_norm_eps": 1e-5}
JOB = """\
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 64
vocab = 64
[data]
path = "data"
sequence = 10
tokens = 4000
[batch]
global_sequences = 4
"""


def tokenizer(words: Sequence[str] = WORDS, **changes: Any) -> str:
    model = {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": ["a b"]}
    added = [{"id": 0, "content": words[0], "special": True}]
    found = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": None, "model": model}
    return json.dumps({**found, **changes})


def dataset(
    folder: Path, text: str = "", *, vocab: int = 9, tokens: Mapping[str, int] | None = None, heldout: int = 50
) -> Path:
    text = text or tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(text)
    sources = tuple(_source(name, count, heldout) for name, count in (tokens or {"text": 1001}).items())
    manifest = DatasetManifest(
        phalanx="0",
        vocab=vocab,
        dtype="uint16",
        end_of_text=0,
        tokenizer_sha256=hashlib.sha256(text.encode()).hexdigest(),
        heldout=0.1,
        split_on="file",
        sources=sources,
    )
    (folder / "manifest.json").write_text(manifest.dump())
    return folder


def _source(name: str, tokens: int, heldout: int) -> Source:
    sizes = {"documents": 1, "text_bytes": 1, "sha256": "", "index_sha256": ""}
    shards = (
        Shard(file=f"{name}-t.bin", split="train", tokens=tokens, **sizes),  # type: ignore[arg-type]
        Shard(file=f"{name}-h.bin", split="heldout", tokens=heldout, **sizes),  # type: ignore[arg-type]
    )
    return Source(name=name, path=name, weight=3.0 if name == "often" else 1.0, shards=shards)


def weights(folder: Path, text: str | None = None, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    return folder


def look(folder: Path, *overrides: str, fresh: bool = True) -> InputFindings:
    (folder / "job.toml").write_text(JOB)
    resolved = load(folder / "job.toml", overrides=overrides)
    environ = {"XDG_CACHE_HOME": str(folder / "cache")}
    return look_at_inputs(resolved.job, folder, origins=resolved.origins, environ=environ, fresh=fresh)


def heads(problems: Sequence[Any]) -> list[str]:
    return [problem.render().splitlines()[0] for problem in problems]


def test_nothing_to_say_of_what_fits(tmp_path: Path) -> None:
    dataset(tmp_path / "data")
    weights(tmp_path / "w", tokenizer())
    found = look(tmp_path, "train.weights=w")
    assert (found.refused, found.cautions) == ((), ())
    assert found.remarks == ("data: 1.00k tokens to read, 4.00k to train on: 4 passes",)


@pytest.mark.parametrize(
    "same",
    [
        tokenizer(truncation={"max_length": 5}, padding={"pad_id": 0}, post_processor={"type": "x"}),
        tokenizer().replace('"a b"', '["a", "b"]').replace('"type": "BPE"', '"type": "BPE", "ignore_merges": false'),
        json.dumps(json.loads(tokenizer()), indent=2),
        tokenizer((*WORDS, "i", "j")),  # the weights know more words: every number of the data still means the same
    ],
)
def test_a_tokenizer_that_gives_the_same_numbers_is_the_same(tmp_path: Path, same: str) -> None:
    dataset(tmp_path / "data")
    weights(tmp_path / "w", same)
    found = look(tmp_path, "train.weights=w")
    assert (found.refused, found.cautions) == ((), ())


def test_weights_with_another_tokenizer_are_refused(tmp_path: Path) -> None:
    dataset(tmp_path / "data")
    weights(tmp_path / "w", tokenizer(("<end>", *"bacdefgh")))
    (problem,) = look(tmp_path, "train.weights=w").refused
    assert problem.render() == (
        f"--set train.weights=w: {tmp_path / 'w'} has another tokenizer than the data in {tmp_path / 'data'}: "
        "2 of 9 tokens differ, e.g. id 1: 'a' in the data, 'b' to the weights\n"
        "  the weights would read other tokens than were written, and no error would occur\n"
        f"  build the data with the weights' tokenizer: phalanx data build OUT SOURCE… --tokenizer "
        f"{tmp_path / 'w' / 'tokenizer.json'}"
    )
    assert look(tmp_path, "train.weights=w", fresh=False).refused == (), "a run that goes on has its weights"


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        (tokenizer(WORDS[:8]), "", "the data has 1 token that the tokenizer of the weights does not know"),
        (
            tokenizer(normalizer={"type": "Lowercase"}),
            "",
            "has the same tokens as the weights' but splits text by other rules",
        ),
        (None, "", "has no tokenizer.json, so Phalanx cannot tell whether data and weights use the same tokenizer"),
    ],
)
def test_what_is_not_sure_is_warned_of(tmp_path: Path, theirs: str | None, ours: str, told: str) -> None:
    dataset(tmp_path / "data", ours)
    weights(tmp_path / "w", theirs)
    found = look(tmp_path, "train.weights=w")
    assert found.refused == ()
    assert told in heads(found.warnings)[0]
    assert all(problem.why and problem.fix for problem in found.warnings)


def test_words_of_older_tokenizers_are_compared_too(tmp_path: Path) -> None:
    dataset(tmp_path / "data")
    folder = weights(tmp_path / "w")
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(WORDS)}))
    assert look(tmp_path, "train.weights=w").cautions == ()
    (folder / "vocab.json").write_text(json.dumps({word: number + 1 for number, word in enumerate(WORDS)}))
    assert "9 of 9 tokens differ" in heads(look(tmp_path, "train.weights=w").refused)[0]


def test_a_tokenizer_that_is_none_or_was_exchanged(tmp_path: Path) -> None:
    dataset(tmp_path / "data")
    weights(tmp_path / "w", '{"model": {"vocab": {"a": "one"}}}')
    assert "has words without a number" in heads(look(tmp_path, "train.weights=w").refused)[0]
    (tmp_path / "w" / "tokenizer.json").write_text("[" * 100_000)
    assert "cannot be read" in heads(look(tmp_path, "train.weights=w").refused)[0]
    (tmp_path / "w" / "tokenizer.json").write_text(tokenizer())
    (tmp_path / "data" / "tokenizer.json").write_text(tokenizer(("<end>", *"hgfedcba")))
    assert "is not the tokenizer the data was built with" in heads(look(tmp_path, "train.weights=w").refused)[0]


def test_weights_of_another_model(tmp_path: Path) -> None:
    dataset(tmp_path / "data")
    weights(tmp_path / "w", tokenizer(), vocab_size=128, hidden_size=48)
    (problem,) = look(tmp_path, "train.weights=w").refused
    assert "holds a different model: hidden = 48 (the job: 32), vocab = 128 (the job: 64)" in problem.what
    assert problem.fix == f'take the shape from there: model.hf_config = "{tmp_path / "w" / "config.json"}"'
    weights(tmp_path / "v", tokenizer(), rope_theta=500_000.0)
    (problem,) = look(tmp_path, "train.weights=v").warnings
    assert "were trained with other settings: rope_theta = 500000.0 (the job: 10000.0)" in problem.what


def test_a_vocabulary_that_is_too_small_or_far_too_large(tmp_path: Path) -> None:
    dataset(tmp_path / "data", vocab=65)
    (problem,) = look(tmp_path).refused
    assert problem.render() == (
        f"{tmp_path / 'job.toml'}:7: model.vocab: {tmp_path / 'data'} has a vocabulary of 65, larger than the model's "
        "64\n"
        "  token ids beyond the last row of the embedding cannot be looked up\n"
        "  set model.vocab = 128 or more (matrix products are fastest with multiples of 64), as no data has "
        "fewer than 257 tokens: all bytes and the end of text"
    )
    assert look(tmp_path, "model.vocab=577").warnings == (), "512 rows are padding"
    (problem,) = look(tmp_path, "model.vocab=128256").warnings
    assert problem.what == (
        f"the model has 128,256 tokens, and {tmp_path / 'data'} uses 65 of them: 8.20M parameters (100% of the model) "
        "are never trained"
    )
    assert problem.fix.startswith("set model.vocab = 128, or build the data with the model's own tokenizer: ")
    tied = look(tmp_path, "model.vocab=128256", "model.tied=true").warnings[0].what
    assert "4.10M parameters" in tied


def test_a_corpus_that_is_not_built_yet_has_a_known_size(tmp_path: Path) -> None:
    (problem,) = look(tmp_path, "data={path=[], corpus='offline-english'}", "model.vocab=128256").warnings
    assert 'the model has 128,256 tokens, and the corpus "offline-english" uses 8,192 of them' in problem.what
    assert look(tmp_path, "data={path=[], corpus='offline-english'}").cautions == ()


def test_datasets_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    dataset(tmp_path / "a")
    dataset(tmp_path / "b", tokenizer(("<end>", *"bacdefgh")))
    assert heads(look(tmp_path, "data.path=['a', 'b']").refused) == [
        f"{tmp_path / 'b'}: was built with another tokenizer than {tmp_path / 'a'}"
    ]


def test_passes_are_counted_by_source_and_weight(tmp_path: Path) -> None:
    """A source of weight 3 is seen three times as often as the others; samples are whole sequences."""
    dataset(tmp_path / "data", tokens={"often": 101, "seldom": 701})
    found = look(tmp_path, "data.tokens=3000")
    assert found.remarks == ("data: 802 tokens to read, 3.00k to train on: 9 passes over often",)
    (problem,) = found.warnings
    assert problem.render() == (
        "--set data.tokens=3000: 3.00k tokens are 9 passes over the source 'often' of 802 tokens of data\n"
        "  beyond about 4 passes each pass adds less (arXiv 2305.16264), and the model memorises the text\n"
        "  build from more text, or train on data.tokens = 1_333 or fewer"
    )
    assert look(tmp_path, "data.tokens=1333").warnings == ()
    assert "hardly anything left to learn" in look(tmp_path, "data.tokens=30000").warnings[0].why
    assert passes_of([], tokens=10, sequence=10) == {}


def test_what_is_missing_is_named_with_its_line(tmp_path: Path) -> None:
    found = look(tmp_path, "train.weights=nowhere", "model.module=net.py:build")
    assert (found.refused, found.warnings) == ((), ())
    assert heads(found.missing) == [
        f'--set model.module=net.py:build: "net.py:build": there is no file {tmp_path / "net.py"}',
        f"--set train.weights=nowhere: there is no folder {tmp_path / 'nowhere'}",
        f"{tmp_path / 'job.toml'}:9: data.path: there is no folder {tmp_path / 'data'}",
    ]
    assert all(problem.why and problem.fix for problem in found.missing)
    found = look(tmp_path, "model.module=no_such_package.inner:build")
    assert "no package no_such_package is installed here" in heads(found.missing)[0]
    (tmp_path / "data").mkdir()
    assert "is not a dataset: it has no manifest.json" in heads(look(tmp_path).missing)[0]


def test_code_of_the_users_own_is_looked_at_without_running_it(tmp_path: Path) -> None:
    dataset(tmp_path / "data", heldout=20)
    (tmp_path / "mine.py").write_text(
        "raise SystemExit('this was run')\n"
        "if True:\n    from torch import nn as layers\n"
        "try:\n    loss = 1\nexcept ImportError:\n    def fallback(): ...\n"
        "class Model: ...\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "starred.py").write_text("from mine import *\n")
    for name in ("mine.py:loss", "mine.py:Model.build", "mine.py:layers", "mine.py:fallback", "starred.py:any_name"):
        assert look(tmp_path, f"plugins.loss={name}").missing == (), name
    for setting, told in (
        ("plugins.loss=nope.py:x", f'"nope.py:x": there is no file {tmp_path / "nope.py"}'),
        ("plugins.optimizer=mine.py:lost", f'"mine.py:lost": {tmp_path / "mine.py"} has no lost'),
        ("plugins.data=broken.py:x", f'"broken.py:x": {tmp_path / "broken.py"}:2: is not Python: '),
        ('plugins.metrics=["no_such_package.a:b"]', '"no_such_package.a:b": no package no_such_package is installed'),
        ('plugins.callbacks=["nobody"]', "\"nobody\": no installed package offers 'nobody' as an entry point of"),
        ("model.module=nobody", "\"nobody\": no installed package offers 'nobody' as an entry point of phalanx.models"),
        ("model.module=mine.py:build", f'"mine.py:build": {tmp_path / "mine.py"} has no build'),
    ):
        (problem,) = look(tmp_path, setting).missing
        assert problem.where == f"--set {setting}"
        assert problem.what.startswith(told), problem.what
        assert problem.why
    assert look(tmp_path, "plugins.loss=mine.py:los").missing[0].fix == "did you mean loss?"
    (problem,) = look(tmp_path, 'rules=["nope.py:x"]').warnings
    assert problem.what == f'"nope.py:x": there is no file {tmp_path / "nope.py"}', "training needs no rules"
    (tmp_path / "late.py").write_text("def make():\n    global Loss\n    Loss = 1\nmake()\n")
    (tmp_path / "hidden.py").write_text("globals()['Loss'] = 1\n")
    for name in ("late.py:Loss", "hidden.py:Loss"):
        assert look(tmp_path, f"plugins.loss={name}").missing == (), name


def test_code_that_imports_what_is_not_there(tmp_path: Path) -> None:
    dataset(tmp_path / "data", heldout=20)
    (tmp_path / "beside.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text(
        '"""Doc."""\nimport os.path\nfrom torch import nn\nfrom beside import x\nloss = 1\n'
    )
    (tmp_path / "moved.py").write_text("import sys\nsys.path.append('elsewhere')\nimport helper_abc\nloss = 1\n")
    (tmp_path / "asks.py").write_text("try:\n    import helper_abc\nexcept ImportError:\n    pass\nloss = 1\n")
    for name in ("mine", "moved", "asks"):
        assert look(tmp_path, f"plugins.loss={name}.py:loss").missing == (), name
    (tmp_path / "lost.py").write_text("from beside import x\nfrom helper_abc.inner import y\nloss = 1\n")
    (problem,) = look(tmp_path, "plugins.loss=lost.py:loss").missing
    path = tmp_path / "lost.py"
    what = f'"lost.py:loss": {path}:2: imports helper_abc, which is neither installed here nor beside it'
    assert (problem.what, problem.fix) == (what, "put helper_abc.py there, or install helper_abc where the ranks run")


def test_a_module_that_is_not_found_has_a_cure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def build():\n    ...\n\nif True:\n    import helper_abc\n")
    with pytest.raises(UserError) as caught:
        load_user_object("mine.py:build", folder=tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'mine.py'}:5: mine.py:build cannot be run: ModuleNotFoundError: No module named 'helper_abc'\n"
        "  put helper_abc.py beside the file that imports it, or install helper_abc where the ranks run"
    )


def test_evaluations_without_text_to_evaluate_on(tmp_path: Path) -> None:
    dataset(tmp_path / "data", heldout=10)
    (problem,) = look(tmp_path, "train.evaluate_every=5").warnings
    assert problem.what == "has no effect: the data has no held-out sequence of 10 tokens"
    assert look(tmp_path).warnings == ()
