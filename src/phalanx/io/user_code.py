"""User code named as "file.py:name" or "package.module:name": load it, run it, and attribute its errors to it.

The caller must have the user's consent: importing a file runs it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from phalanx.errors import UserError, mistake, nearest
from phalanx.io.path_probes import is_file, resolve_path

# Folders that `find_neighbours` added to sys.path.
_neighbour_folders: set[str] = set()
NAME_PATTERN = r"[^:\x00-\x1f]{1,1024}(:[A-Za-z_][A-Za-z0-9_]{0,255})?"


def absolute_code(name: str, base: Path) -> str:
    """Return "file.py:name" with the file as an absolute path relative to `base`; the name of a package is unchanged.

    >>> absolute_code("rules.py:mine", Path("/jobs")), absolute_code("acme.rules:mine", Path("/jobs"))
    ('/jobs/rules.py:mine', 'acme.rules:mine')
    """
    place, colon, attribute = name.partition(":")
    return f"{resolve_path(base / place)}{colon}{attribute}" if place.endswith(".py") else name


def load_user_object(name: str, *, folder: Path) -> object:
    """Return the object that "file.py:name" names, with the file relative to `folder`; without `:`, the module.

    The file is run again at each call, so that edits take effect. Raises UserError, with the line of the user's code
    if that is at fault.
    """
    place, _, attribute = name.partition(":")
    module = _run_file(folder / place, name) if place.endswith(".py") else _import_package(place, name)
    if not attribute:
        return module
    if not hasattr(module, attribute):
        close = nearest(attribute, [member for member in vars(module) if not member.startswith("__")])
        raise mistake(name, f"{place} has no {attribute}", fix=f"did you mean {close}?" if close else "")
    return getattr(module, attribute)


def find_neighbours(path: Path) -> None:
    """Let a file import the files in its folder, as a script can; installed packages take precedence.

    Modules of an earlier file's folder are removed: a module of the same name in another folder is a different one,
    and an edited one must be loaded again.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("phalanx") and _folder_of(module) in _neighbour_folders:
            del sys.modules[name]
    sys.path[:] = [path_entry for path_entry in sys.path if path_entry not in _neighbour_folders]
    _neighbour_folders.clear()
    folder = str(resolve_path(path).parent)
    if folder not in sys.path:
        _neighbour_folders.add(folder)
        sys.path.append(folder)


def _folder_of(module: ModuleType) -> str:
    return str(Path(getattr(module, "__file__", None) or ".").parent)


def _run_file(path: Path, name: str) -> ModuleType:
    if not is_file(path):
        raise mistake(name, f"there is no file {path}", fix="write it as file.py:name, relative to the job file")
    # Files of the same name in two folders are two modules.
    key = f"phalanx_user_{path.stem}_{hashlib.sha256(str(resolve_path(path)).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    find_neighbours(path)
    # Dataclasses in user code look their module up there.
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise user_code_error(name, "cannot be run", error) from error
    return module


def _import_package(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        fix = "" if "." in place or ":" in name else "write it as file.py:name or package.module:name"
        raise user_code_error(name, "cannot be imported", error, fix=fix) from error


def user_code_error(name: str, what: str, error: BaseException, *, fix: str = "") -> UserError:
    """Return the error for a fault in user code, at the last of its lines that ran."""
    if isinstance(error, ModuleNotFoundError) and error.name and not fix:
        top = error.name.partition(".")[0]
        fix = f"put {top}.py beside the file that imports it, or install {top} where the ranks run"
    return mistake(last_line(error), f"{name} {what}: {type(error).__name__}: {error}"[:500], fix=fix)


def _is_import_machinery(file: str) -> bool:
    """Return True for frames of Python's import system and of this module, which are never at fault."""
    return file.startswith("<frozen importlib") or file in (importlib.__file__, __file__)


def last_line(error: BaseException) -> str:
    """Return file:line where an exception was raised; empty if no frame belongs to a file of code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_import_machinery(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
