"""Libraries that come with an extra: a missing one answers with the command that installs it."""

from __future__ import annotations

from importlib import import_module

from phalanx.errors import mistake


def need(module: str, *, extra: str, what: str) -> None:
    """Import a library, or raise UserError with the pip command."""
    try:
        import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise mistake(
            what, f'needs the Python package "{missing}", which is not installed', fix=f"pip install 'phalanx[{extra}]'"
        ) from error
