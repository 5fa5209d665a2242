"""argparse that complains like the rest of Phalanx: what is wrong, and the nearest option that exists."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from phalanx.errors import mistake, nearest


class Parser(argparse.ArgumentParser):
    """Raises UserError instead of printing usage and exiting; options cannot be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake in the call."""
        raise mistake(self.prog, message, fix=f"{self._hint(message)}{self.prog} --help lists the options")

    def _hint(self, message: str) -> str:
        head, _, rest = message.partition("unrecognized arguments: ")
        if head or not rest.startswith("-"):
            return ""
        close = nearest(rest.split()[0].partition("=")[0], self._option_string_actions)
        return f"did you mean {close}? " if close else ""
