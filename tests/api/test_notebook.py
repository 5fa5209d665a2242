"""examples/first-steps.ipynb runs from the first cell to the last, in a kernel where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Runs the cells as a kernel does: one namespace, in order, the value of a last expression shown.
EXECUTOR = """
import ast, json, linecache, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] != "code":
        continue
    text, name = "".join(cell["source"]), f"<ipython-input-{number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)  # as IPython does, for inspect.getsource
    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    sys.modules["__main__"].__dict__.update(names)
    exec(compile(tree, name, "exec"), sys.modules["__main__"].__dict__)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), sys.modules["__main__"].__dict__)
        print(getattr(value, "_repr_html_", lambda: repr(value))()[:2000])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("first-steps.ipynb", "llama-3-8b-64xH100.toml"):
        shutil.copy(EXAMPLES / name, tmp_path / name)
    return tmp_path


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "first-steps.ipynb").read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("phalanx.train.callbacks") is None, reason="the trainer has no callbacks yet")
@pytest.mark.filterwarnings("ignore")  # of the kernel's own libraries
def test_first_steps(folder: Path) -> None:
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        done = subprocess.run(
            [sys.executable, "-c", EXECUTOR, "first-steps.ipynb"], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        shown, words = done.stdout, ("of 79.0 GB usable", "<iframe", "svg")
    else:
        import nbclient
        import nbformat

        notebook = nbformat.read(folder / "first-steps.ipynb", as_version=4)
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
        shown = json.dumps(notebook.cells)
        words = ("of 79.0 GB usable", "<iframe", "svg", "Prediction and measurement")
    assert len((folder / "first-steps" / "losses.txt").read_text().splitlines()) == 20
    (run,) = (folder / "first-steps" / "runs").iterdir()
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    for word in words:
        assert word in shown
