"""Import of a module from source text without a file, so that Triton can still read the lines of its kernels."""

from __future__ import annotations

import importlib.abc
import importlib.util
import linecache
import sys
from types import CodeType, ModuleType


class SourceLoader(importlib.abc.InspectLoader):
    """Loader of a module from its source text."""

    def __init__(self, text: str, file: str) -> None:
        self._text, self._file = text, file

    def get_source(self, fullname: str) -> str:
        """Return the source text."""
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        """Return the compiled source, under the file name that the line cache knows."""
        return self.source_to_code(self._text, self._file)  # type: ignore[return-value, unused-ignore]


def load_source(name: str, text: str) -> ModuleType:
    """Run the source once as the module `name` and return the module."""
    file = f"{name}.py"
    # Triton reads a kernel's lines with inspect, which finds them in this cache.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    spec = importlib.util.spec_from_loader(name, SourceLoader(text, file), origin=file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = file
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
