"""Files of strangers: hostile, damaged, or of another kind. A clear refusal, never a crash, and nothing is run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phalanx.errors import PhalanxError, UserError
from phalanx.rules.foreign.config_files import json_lines, read_tree
from phalanx.rules.foreign.conversion import Leaf
from phalanx.rules.foreign.convert import convert_config
from phalanx.rules.foreign.detect import trainer_of_file
from phalanx.rules.foreign.readers import TRAINERS
from phalanx.rules.foreign.shell.training_command import leaves_of_script, read_script

DATA = Path(__file__).parent / "data"
JUNK = ("-1", "1e308", "NaN", "null", "[]", "{}", '"', "9" * 30, "${a.b}", "*a", "&a", "\x1b[31m", "(", "$(x)", "`x`")


def read_arguments(path: Path) -> dict[str, Leaf]:
    return leaves_of_script(read_script(path, {}))


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"bf16": {', "is not JSON"),
        ("a.json", "[1, 2]", "is not a JSON object"),
        ("a.json", '{"a": 1, "a": 2}', "is given twice"),
        # Quadratic work on this one takes minutes.
        ("a.json", "{" + "".join(f'"k{i}": 1, ' for i in range(60_000)) + '"k59999": 2}', "'k59999' is given twice"),
        ("a.json", '{"a": "' + '\\"' * 400_000, "is not JSON"),  # and on this one: a quote that never closes
        ("a.json", '{"a": NaN}', "NaN is not a number"),
        ("a.json", "[" * 5000, "nests deeper"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ("a.yaml", "a: [1, 2", "is not YAML"),
        ("a.yaml", "- 1\n- 2\n", "is not a YAML mapping"),
        ("a.yaml", "a: " + "[" * 2000, "nests deeper"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "more than one document"),
        ("a.yaml", "".join(f"k{i}: 1\nk{i}: 2\n" for i in range(60)), "is given twice, as many others"),
        ("a.yaml", "? [1, 2]\n: 3\n", "as a key"),
        ("a.yaml", "a: " + "x" * 300_000, "larger than 256 KiB"),
        ("a.toml", "[training\n", "is not TOML"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_tree(written(tmp_path, name, text))


def test_aliases_of_aliases_do_not_grow_without_end(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    with pytest.raises(UserError, match="holds more"):
        read_tree(written(tmp_path, "bomb.yaml", bomb))
    with pytest.raises(UserError, match=r"loop.yaml:2: alias \*a names nothing that is finished"):
        read_tree(written(tmp_path, "loop.yaml", "a: &a\n  b: *a\n"))
    shared = written(tmp_path, "shared.yaml", "a: &a\n  b: 1\nc: *a\n")
    assert {key: (leaf.value, leaf.line) for key, leaf in read_tree(shared).items()} == {"a.b": (1, 2), "c.b": (1, 3)}


def test_tags_build_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "a: !!python/object/apply:os.system ['touch here']\nb: !!binary aGk=\n")
    assert {key: leaf.value for key, leaf in read_tree(path).items()} == {"a": ["touch here"], "b": "aGk="}


def test_a_script_is_read_and_never_run(tmp_path: Path) -> None:
    flag = tmp_path / "touched"
    text = f"""
    N=$(touch {flag})
    M=`touch {flag}`
    TP=4
    ARGS=( --tensor-model-parallel-size $TP --num-layers ${{LAYERS:-24}} --hidden-size $N --lr $((1+1)) )
    if [ "$X" = 1 ]; then
      EXTRA="--bf16 --micro-batch-size 3"
    fi
    MORE=" \\
      --seq-length 128 \\
      --tensor-model-parallel-size 8 \\
    "
    NEVER="--pipeline-model-parallel-size 16"
    python pretrain_gpt.py ${{ARGS[@]}} $MORE --data-path 'a b' --fp16 $EXTRA
    """
    found = read_arguments(written(tmp_path, "run.sh", text))
    assert not flag.exists()
    assert found["--tensor-model-parallel-size"].value == "8"  # the last one holds
    assert found["--num-layers"].value == "24"
    assert "is not run" in found["--hidden-size"].unknown
    assert found["--data-path"].value == "a b"
    assert found["--fp16"].value is True
    assert found["--seq-length"].line == 10
    assert found["--bf16"].unknown.endswith("depends on the condition in line 6")
    assert "--pipeline-model-parallel-size" not in found  # it never reaches the command


def test_variables_in_variables_do_not_grow_without_end(tmp_path: Path) -> None:
    text = "A0=" + "x" * 100 + "\n" + "".join(f"A{i}=${{A{i - 1}}}${{A{i - 1}}}\n" for i in range(1, 60))
    found = read_arguments(written(tmp_path, "run.sh", text + "--hidden-size 4 --num-layers $A59\n"))
    assert found["--num-layers"].unknown
    assert len(str(found["--num-layers"].value)) <= 4096


@pytest.mark.parametrize(
    "text",
    [
        '"' + r"\"" * 120_000,
        "'" + '"' * 250_001,
        '"${A-' + "${A-" * 20_000 + '"',
        "$((" * 20_000,
        "a=(" * 80_000,
        "if true; then\n" * 5_000,
        "f() { f; f; }; f\n",
        "while true; do A=$A.; done\n",
        "eval 'eval $X'; X='eval $X'; eval $X\n",
        "x=$((" + "(" * 5_000,
        "[[ " + "! " * 9_000 + "a ]]\n",
        "case $A in " + "@(" * 3_000,
        "source run.sh\n",
        "bash run.sh\n",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_text_costs_little_and_is_refused_or_read(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, "run.sh", "--num-layers 4 --hidden-size 64\n" + text)
    try:  # a quadratic pattern would take minutes
        found = read_arguments(path)["--num-layers"].value
    except UserError as error:
        found = error.problems[0].where
    assert found == "4" or str(found).startswith(str(path))


def test_lines_of_json_keys() -> None:
    text = '{\n "a": [{"b": 1},\n {"b": {"c":\n 2}}],\n "d\\"e": 3}'
    lines = json_lines(text, file="x")
    assert lines[("a", 0, "b")] == 2
    assert lines[("a", 1, "b", "c")] == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", '{"hello": 1}'), ("a.yaml", "hello: 1\n"), ("a.yml", "model: x\n"), ("a.json", "{}")],
)
def test_what_is_nobodys_is_refused_with_the_choices(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UserError, match="none of megatron, torchtitan, deepspeed"):
        trainer_of_file(written(tmp_path, name, text))


def test_a_job_file_is_none_of_theirs(tmp_path: Path) -> None:
    examples = Path(__file__).parents[3] / "examples"
    assert [trainer_of_file(path) for path in sorted(examples.glob("*.toml"))] == [""] * len(
        list(examples.glob("*.toml"))
    )
    ours = 'spec = "2026.1"\n[model]\npreset = "gpt2"\n[batch]\nglobal_sequences = 8\n[training]\n[parallelism]\n'
    assert trainer_of_file(written(tmp_path, "job.toml", ours)) == ""


def test_an_unknown_trainer_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean megatron"):
        convert_config(DATA / "megatron_llama3_8b.txt", "megatronlm")


def test_unprintable_names_and_values_stay_out_of_the_job_file(tmp_path: Path) -> None:
    path = written(tmp_path, "x.json", '{"train_batch_size": 8, "evil\\u001b[31m": "a\\u001b]0;x\\u0007\\n[cluster]"}')
    found = convert_config(path, "deepspeed", cluster="8xA100:1", overrides=("model.preset=gpt2", "data.sequence=1024"))
    assert found.text.isprintable() or all(one.isprintable() or one == "\n" for one in found.text)
    assert "\n[cluster]\nspec" in found.text  # our own section, and no other
    assert found.text.count("\n[cluster]") == 1


def test_damaged_files_are_refused_or_read_and_nothing_is_lost(tmp_path: Path) -> None:
    """Sixty random damages, no plan: every one ends in a UserError or in a full account."""
    draw = random.Random(6)
    files = sorted(path for path in DATA.iterdir() if path.is_file())
    for _ in range(60):
        source = draw.choice(files)
        text = source.read_text(encoding="utf-8")
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(JUNK) + text[at + draw.randint(0, 30) :]
        path = written(tmp_path, source.name, text)
        kind = next((name for name in TRAINERS if source.name.startswith(name)), "nemo")
        try:
            trainer_of_file(path)
            found = convert_config(path, kind)
            leaves = TRAINERS[kind].read(path, {}).leaves
        except PhalanxError:
            continue
        assert len(found.mapped) + len(found.irrelevant) + len(found.unmapped) == len(leaves)
