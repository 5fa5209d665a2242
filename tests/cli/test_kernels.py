"""`phalanx kernels` as a person calls it, on a small operation of the tests."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from row_norm import ROW_NORM, SOUND

from phalanx.cli.main import main
from phalanx.train.kernels.kernel_op import KERNELS
from phalanx.train.kernels.lab.candidate_server import CandidateServer
from phalanx.train.kernels.lab.skill_eval import SKILL_FOLDER, skill_text, task_prompt

CHEATS = Path(__file__).parents[1] / "train" / "kernels" / "cheats"


@pytest.fixture(scope="module")
def server() -> Iterator[CandidateServer]:
    with CandidateServer() as server:
        yield server


@pytest.fixture(autouse=True)
def only_row_norm(server: CandidateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation; and one process that has imported torch, for all calls."""
    monkeypatch.setattr(
        "phalanx.train.kernels.lab.candidate_server.CandidateServer", lambda: contextlib.nullcontext(server)
    )
    monkeypatch.setattr("phalanx.train.kernels.operations.MODULES", ())
    monkeypatch.setattr("phalanx.train.kernels.kernel_op.KERNELS", KERNELS)
    for name in list(KERNELS):
        monkeypatch.delitem(KERNELS, name)
    monkeypatch.setitem(KERNELS, "row_norm", ROW_NORM)


def test_list_says_where_and_how_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list"]) == 0
    page = capsys.readouterr().out
    assert "row_norm   builtin   cuda, cpu  float32 1.0e-05, bfloat16 7.8e-03" in page
    assert main(["kernels", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["variants"] == ["builtin"]


def test_a_new_kernel_passes_at_once_and_a_changed_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "new", "row_norm", "--out", str(tmp_path / "mine")]) == 0
    file = tmp_path / "mine" / "kernel.py"
    call = ["kernels", "verify", str(file), "--device", "cpu", "--no-time"]
    assert main(["kernels", "new", "row_norm", "--out", str(tmp_path / "mine")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(call) == 2  # nobody said that it may be run
    assert "read it, then give --allow-code" in capsys.readouterr().err
    assert main([*call, "--allow-code", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["op"], found["with_gradients"]) == (True, "row_norm", True)
    compile((tmp_path / "mine" / "test_kernel.py").read_text(), "test_kernel.py", "exec")
    compile((tmp_path / "mine" / "bench_kernel.py").read_text(), "bench_kernel.py", "exec")
    compile((tmp_path / "mine" / "reference.py").read_text(), "reference.py", "exec")
    file.write_text(file.read_text().replace("1e-06", "1e-02"))
    assert main([*call, "--allow-code"]) == 1
    assert "refused (values): float32, tokens " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("def kernel(x", [], "is not Python"),
        ("def kernel(x):\n    return x\n", [], "does not say which operation it is for"),
        ('OP = "row_nrm"\n', [], "did you mean row_norm?"),
        (SOUND, ["--op", "other"], 'is for the operation "row_norm", and --op says other'),
        (SOUND, ["--shape", "tokens=x"], "is not of the form tokens=4096,width=2048"),
        (SOUND, ["--shape", "rows=4"], "are not the sizes of row_norm"),
        (SOUND, ["--device", "abacus"], '"abacus" is no device'),
        (SOUND, ["--time-limit", "-1"], "is not in 1 to 3600 s"),
    ],
)
def test_mistakes_of_the_caller_are_said(
    text: str, options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(text)
    assert main(["kernels", "verify", str(file), "--allow-code", *options]) == 2
    assert told in capsys.readouterr().err


def test_no_gpu_is_said_clearly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["kernels", "bench", "row_norm", "--device", "cuda"]) == 3
    assert "there is no GPU that this PyTorch can use\n  use --device cpu" in capsys.readouterr().err


def test_bench_measures_and_writes_a_dated_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["kernels", "bench", "row_norm", "--device", "cpu", "--no-compile", "--dtype", "fp32"]
    shapes = ["--shape", "tokens=64,width=128", "--shape", "tokens=3,width=7"]
    assert main([*call, *shapes, "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["shape"]["tokens"]) for one in found["rows"]] == [
        ("eager", 64),
        ("builtin", 64),
        ("eager", 3),
        ("builtin", 3),
    ]
    assert all(one["seconds"] > 0 and one["error"] <= 1 for one in found["rows"])
    stem = f"{found['date']}-row_norm-float32-cpu"
    assert json.loads((tmp_path / f"{stem}.json").read_text())["rows"] == found["rows"]
    assert (tmp_path / f"{stem}.svg").read_text().startswith("<svg xmlns=")
    assert main([*call, "--shape", "tokens=3"]) == 2
    assert main(["kernels", "bench", "row_norm", "--dtype", "int8"]) == 2
    assert "row_norm has no int8" in capsys.readouterr().err


# ---- who writes kernels ----------------------------------------------------------------------------------------------


def written_proposer(folder: Path, text: str) -> list[str]:
    file = folder / "propose.py"
    file.write_text(text)
    return ["--proposer", f"{sys.executable} {file}"]


# Writes a sound kernel when it has read the skill, else nonsense, a cheat or nothing, in turn.
MODEL = f"""
import sys
prompt = sys.stdin.read()
if "# Kernels for the Phalanx lab" in prompt:
    print("Here it is:\\n```python\\n" + {SOUND!r} + "```")
else:
    print("As a language model I would rather not.")
"""


def test_skill_eval_measures_what_the_skill_adds_and_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["kernels", "skill-eval", "--device", "cpu", "--op", "row_norm"]
    proposer = written_proposer(tmp_path, MODEL)
    assert main([*call, *proposer]) == 2
    assert "would be run" in capsys.readouterr().err
    transcript = tmp_path / "transcript.jsonl"
    assert main([*call, *proposer, "--allow-code", "--record", str(transcript)]) == 0
    page = capsys.readouterr()
    assert "row_norm              0 of 1          1 of 1" in page.out
    assert "why the others did not pass: no kernel 1" in page.out
    assert "the answer holds no function kernel" in page.err
    # a transcript with other answers: what changed is judged anew
    cheat = (CHEATS / "half_the_rows.txt").read_text()
    lines = [json.dumps({"prompt": task_prompt(ROW_NORM, with_skill=True), "answer": f"```python\n{cheat}\n```"})]
    lines += [json.dumps({"prompt": task_prompt(ROW_NORM, with_skill=False), "answer": SOUND})]
    transcript.write_text("\n".join(lines))
    assert main([*call, "--replay", str(transcript), "--allow-code", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["with_skill"], found["without_skill"]) == (0.0, 1.0)
    assert [one["kind"] for one in found["attempts"]] == ["", "values"]


class Endpoint(BaseHTTPRequestHandler):
    """Answers like OpenAI's chat protocol: first nonsense, then a kernel."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**asked, "path": self.path, "key": self.headers["Authorization"]})
        message = {"content": f"```python\n{SOUND}\n```"} if len(self.seen) > 1 else {}
        raw = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.seen = []
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_writes_kernels(
    endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_PROPOSER_KEY", "s3cret")
    call = ["kernels", "skill-eval", "--device", "cpu", "--allow-code", "--endpoint", endpoint]
    assert main(call) == 2
    assert "needs the name of a model" in capsys.readouterr().err
    assert main([*call, "--model", "tiny", "--json"]) == 0
    out = capsys.readouterr().out
    assert [one["passed"] for one in json.loads(out)["attempts"]] == [False, True]
    assert "the endpoint answered without a message" in out
    assert "s3cret" not in out
    assert {(one["path"], one["model"], one["key"]) for one in Endpoint.seen} == {
        ("/v1/chat/completions", "tiny", "Bearer s3cret")
    }
    assert skill_text() in Endpoint.seen[1]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("proposer", "code", "told"),
    [
        (["--proposer", "no-such-program-here"], 2, "there is no program no-such-program-here"),
        (["--proposer", "false"], 3, "gave no answer at all: the command ended with 1"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--model", "m"], 3, "gave no answer at all: http://127.0.0.1:9"),
        ([], 2, "needs one of --proposer, --endpoint and --replay"),
    ],
)
def test_a_proposer_that_is_not_there(
    proposer: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "skill-eval", "--allow-code", "--device", "cpu", *proposer]) == code
    assert told in capsys.readouterr().err


def test_the_skill_is_of_the_public_format() -> None:
    text = (SKILL_FOLDER / "SKILL.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert set(head) == {"name", "description"}
    assert head["name"] == "phalanx-kernels"
    assert len(head["description"]) <= 1024
    cases = json.loads((SKILL_FOLDER / "skill_meta.json").read_text())["test_cases"]
    assert len(cases) >= 3
    assert all(one["input"] and one["expected"]["contains"] for one in cases)
