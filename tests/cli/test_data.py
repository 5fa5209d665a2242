"""`phalanx data` as a person types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main

pytest.importorskip("tokenizers")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of sixty short texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(f"Text {number}: the ship sailed over a grey sea. " * 10)
    return folder


def test_build_show_verify(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["data", "build", str(out), str(texts), "--vocab", "300", "--heldout", "0.1"]) == 0
    built = capsys.readouterr()
    lines = built.out.splitlines()
    assert lines[0].startswith(f"{out}: vocabulary 300, uint16, 2 shards, digest ")
    assert lines[1].startswith("  train ")
    assert lines[2].startswith("  heldout ")
    assert lines[3].startswith("  source   texts: ")
    assert "training a tokenizer with 300 tokens on " in built.err
    assert main(["data", "show", str(out)]) == 0
    assert capsys.readouterr().out == built.out
    assert main(["data", "show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["train"]["documents"] + shown["heldout"]["documents"] == 60
    assert shown["manifest"]["sources"][0]["weight"] == 1.0
    assert main(["data", "checksum", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: all 7 files match their checksums (")
    assert main(["data", "checksum", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == shown["digest"]
    shard = next(out.glob("*.bin"))
    shard.write_bytes(bytes(shard.stat().st_size))
    assert main(["data", "checksum", str(out)]) == 1, "findings, as of `phalanx checkpoints --checksum`"
    assert f"{shard}: has changed: its digest is " in capsys.readouterr().err


def test_weights_and_json(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "odd=2"
    odd.write_text("One more text about the sea.\n\nAnd a second paragraph.")
    call = [
        "data",
        "build",
        str(tmp_path / "out"),
        f"{texts}=0.5",
        str(odd),
        "--vocab",
        "300",
        "--json",
        "--heldout",
        "0",
    ]
    assert main([*call, "--split-on", "blank"]) == 0
    sources = json.loads(capsys.readouterr().out)["manifest"]["sources"]
    assert [(Path(one["path"]).name, one["weight"]) for one in sources] == [("texts", 0.5), ("odd=2", 1.0)]
    assert sources[1]["tally"]["documents"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["OUT"], "SOURCE: none is given\n  name files or folders, or use --corpus offline-english"),
        (["OUT", "TEXTS=-1"], "TEXTS: has the weight -1\n"),
        (["OUT", "TEXTS=two"], 'TEXTS=two: "two" is not a weight\n  write SOURCE=2, or SOURCE alone for 1'),
        (["OUT", "TEXTS", "--vocab", "many"], "--vocab: 'many' is not a number such as 512, 8B or 15T"),
        (["OUT", "TEXTS", "--vocab", "12"], "--vocab: 12 is out of range\n"),
        (["OUT", "TEXTS", "--shard-tokens", "0"], "--shard-tokens: 0 must be at least 1\n  use 1 or more"),
        (["OUT", "TEXTS", "--corpus", "x"], "phalanx data build: --corpus and SOURCE are both given\n"),
        (["OUT", "--corpus", "x"], 'corpus: there is none called "x"\n'),
        (["OUT", "TEXTS", "--vocab", "300", "--tokenizer", "t.json"], "--vocab: has no effect with --tokenizer\n"),
        (["OUT", "TEXTS", "--tokenizer", "none.json"], "none.json: cannot be read: No such file or directory\n"),
        (["OUT", "TEXTSX"], "TEXTSX: does not exist\n"),
        (["TEXTS", "TEXTS"], "TEXTS: already exists\n"),
        (["OUT", "TEXTS", "--heldot", "0"], "phalanx data: unrecognized arguments: --heldot 0\n"),
    ],
)
def test_mistakes(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    filled = [one.replace("TEXTS", str(texts)).replace("OUT", str(tmp_path / "out")) for one in arguments]
    assert main(["data", "build", *filled]) == 2
    assert capsys.readouterr().err.startswith(message.replace("TEXTS", str(texts)))
    assert not (tmp_path / "out").exists()


def test_one_document_leaves_nothing_to_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("A single text, which stays with training. " * 30)
    assert main(["data", "build", str(tmp_path / "out"), str(tmp_path / "a.txt"), "--vocab", "300"]) == 0
    assert "warning: the held-out split is empty" in capsys.readouterr().err


def test_the_command_line_stays_light() -> None:
    """The module is imported for `phalanx data --help`, which needs neither numpy nor tokenizers."""
    import subprocess

    code = "import sys, phalanx.cli.data; print(sorted({'numpy', 'torch', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
