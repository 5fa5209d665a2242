"""A module from its text, without a file: Triton asks for the lines of its kernels again, and finds them."""

from __future__ import annotations

import importlib.abc
import importlib.util
import linecache
import sys
from types import CodeType, ModuleType


class SourceLoader(importlib.abc.InspectLoader):
    """Runs a module from its text."""

    def __init__(self, text: str, file: str) -> None:
        self._text, self._file = text, file

    def get_source(self, fullname: str) -> str:
        """The text."""
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        """Compiled, under a file name that the lines are known by."""
        return self.source_to_code(self._text, self._file)  # type: ignore[return-value, unused-ignore]


def load_source(name: str, text: str) -> ModuleType:
    """The module, run once."""
    file = f"{name}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    spec = importlib.util.spec_from_loader(name, SourceLoader(text, file), origin=file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = file
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
