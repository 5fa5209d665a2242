"""What the verbs of `phalanx fabric` share: numbers of GPUs, and fabrics as JSON."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from phalanx.cli.output import plain
from phalanx.errors import mistake
from phalanx.units import parse_count

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric


def gpus_of(text: str, where: str) -> int:
    """Whole GPUs; `64k` is 64,000, as everywhere in Phalanx."""
    try:
        number = parse_count(text)
    except ValueError as error:
        raise mistake(where, f"--gpus: {error}"[:160], fix="write it as 131072") from None
    if number != number // 1 or abs(number) > 1e18:
        raise mistake(where, f"--gpus {text[:40]} is not a whole number of GPUs", fix="write it as 131072")
    return int(number)


def page_width() -> int | None:
    """Columns of the terminal, or what COLUMNS says; None where the result goes to a file or a pipe."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and len(said) < 6 and int(said) > 0:
        return int(said)
    return shutil.get_terminal_size((0, 0)).columns or None if sys.stdout.isatty() else None


def fabric_plain(fabric: Fabric) -> dict[str, object]:
    """A fabric with the numbers that follow from its fields."""
    derived = {
        "port_gbps": fabric.port_gbps,
        "switches": fabric.switches,
        "hops": fabric.hops,
        "paths": fabric.paths,
        "hosts_one_switch_away": fabric.hosts_per_t0,
    }
    return {**value_plain(fabric), **derived}


def value_plain(value: object) -> dict[str, object]:
    """A dataclass as JSON can hold it."""
    made = plain(value)
    assert isinstance(made, dict)
    return made
