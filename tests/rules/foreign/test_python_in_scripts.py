"""Python within launch scripts: what it prints and writes is followed, or unknown; never the file that lies there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.rules.foreign.convert import convert_config
from phalanx.rules.foreign.shell.python_text import follow_python

ARGUMENTS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --train-iters 1000 --lr 1e-4 --bf16 --vocab-size 32000"
)
TRAIN = f"torchrun pretrain_gpt.py {ARGUMENTS} --tensor-model-parallel-size $TP --global-batch-size ${{GBS:-64}}\n"
ZERO = f"deepspeed pretrain_gpt.py {ARGUMENTS} --global-batch-size 64 --deepspeed --deepspeed_config ds.json\n"


def read_value(tmp_path: Path, text: str, key: str) -> object:
    path = tmp_path / "go.sh"
    path.write_text(text, encoding="utf-8")
    found = convert_config(path, "megatron")
    section, _, name = key.partition(".")
    return "unknown" if key in found.unknown else getattr(getattr(found.resolved.job, section), name)


@pytest.mark.parametrize(
    ("before", "tensor"),
    [
        ('TP=$(python3 -c "print(16 // 2)")\n', 8),
        ('A=4\nTP=$(python3 -c "print(int($A * 8 / 16))")\n', 2),
        ("TP=$(python - <<EOF\nimport math\nn = 9\nprint(f'{math.ceil(n / 2) - 1}')\nEOF\n)\n", 4),
        ('TP=1\neval $(python3 - <<EOF\nprint("TP=8")\nEOF\n)\n', 8),
        ('TP=1\npython3 - <<EOF > env.sh\nprint("export TP=8")\nEOF\nsource env.sh\n', 8),
        ("TP=1\neval $(python3 choose.py)\n", "unknown"),
        ("TP=1\nsource <(python3 choose.py)\n", "unknown"),
        ("TP=1\nexport $(cat sizes.env | xargs)\n", "unknown"),
        ('TP=1\nwhile read -r k v; do export "$k=$v"; done < <(python3 choose.py)\n', "unknown"),
        ('TP=$(python3 -c "import os; print(os.cpu_count())")\n', "unknown"),
        ('TP=$(python3 -c "print(2 ** 100000000)")\n', "unknown"),
        ('TP=2\neval "$(conda shell.bash hook)"\n', 2),
        ("TP=2\nsource activate training\n", 2),
    ],
)
def test_what_reaches_the_command_line(tmp_path: Path, before: str, tensor: object) -> None:
    assert read_value(tmp_path, before + TRAIN, "parallel.tensor") == tensor


LOOP = "for n in range(2):\n    pass\n"
CHANGE = 'c = json.load(open("ds.json"))\nc["zero_optimization"]["stage"] = 3\n'


@pytest.mark.parametrize(
    ("before", "stage"),
    [
        ("", 2),
        (f'python - <<EOF\nimport json\n{CHANGE}json.dump(c, open("ds.json", "w"))\nEOF\n', 3),
        (f'python - <<EOF\nimport json\n{CHANGE}with open("ds.json", "w") as f:\n    json.dump(c, f)\nEOF\n', 3),
        ("S=1\npython -c \"import json; json.dump({'zero_optimization': {'stage': $S}}, open('ds.json', 'w'))\"\n", 1),
        (
            f'python - <<EOF\nimport json\n{LOOP}{CHANGE}json.dump(c, open("ds.json", "w"))\nEOF\n',
            "unknown",
        ),
        ("python make_config.py --out ds.json\n", "unknown"),
        ("jq '.zero_optimization.stage = 3' ds.json > new.json\nmv new.json ds.json\n", "unknown"),
        ('python - <<EOF\nprint(open("ds.json").read())\nEOF\n', 2),
    ],
)
def test_what_reaches_the_json(tmp_path: Path, before: str, stage: object) -> None:
    table = {"zero_optimization": {"stage": 2}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 1}
    (tmp_path / "ds.json").write_text(json.dumps(table), encoding="utf-8")
    assert read_value(tmp_path, before + ZERO, "parallel.zero") == stage
    assert json.loads((tmp_path / "ds.json").read_text(encoding="utf-8")) == table, "nothing is written"


@pytest.mark.parametrize(
    "text",
    [
        "import subprocess\n",
        "__import__('os').system('ls')\n",
        "print(().__class__)\n",
        "x = 'a' * 10**9\nprint(x)\n",
        "print('%s' % 3)\n",
        "x = [1]\nprint(x[5])\n",
        "print(open('a.json'))\n",
        "while True:\n    pass\n",
        "def f(): return 1\nprint(f())\n",
    ],
)
def test_a_program_that_does_more_is_not_followed(text: str) -> None:
    assert follow_python(text, lambda name: None) is None
