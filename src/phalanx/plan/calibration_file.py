"""Read the scalars that `phalanx calibrate` wrote: strictly, for a plan must not rest on a typing error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.io.files import read_text
from phalanx.plan.calibrate import GROUPS, LARGEST_FACTOR
from phalanx.plan.plan import CalibrationNote

VERSION = 1
MOST = LARGEST_FACTOR
NOUN = "calibration file"
CURE = "write it again with phalanx calibrate"


def read_calibration(path: Path) -> CalibrationNote:
    """The scalars in a file. Raises UserError with every mistake in it."""
    where = str(path)
    try:
        data = json.loads(read_text(path, noun=NOUN))
    except (ValueError, RecursionError) as error:
        raise mistake(where, f"is not JSON: {error}", fix=CURE) from None
    if not isinstance(data, dict) or not isinstance(data.get("scalars"), dict):
        raise mistake(where, f"is no {NOUN}: it has no object named scalars", fix=CURE)
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        found = str(data.get("version"))[:40]
        raise mistake(where, f"version = {found} is not {VERSION}, the one this Phalanx reads", fix=CURE)
    problems = [*_names(data["scalars"], where), *_values(data["scalars"], where)]
    if problems:
        raise UserError(problems)
    return CalibrationNote(file=where, scalars={name: float(data["scalars"][name]) for name in GROUPS})


def _names(scalars: Mapping[str, object], where: str) -> list[Problem]:
    problems = []
    for name in scalars:
        if name not in GROUPS:
            close = nearest(name, GROUPS)
            fix = f"did you mean {close}?" if close else f"the scalars are {', '.join(GROUPS)}"
            problems.append(
                Problem(where=where, what=f"scalars.{name[:40]} is not a scalar of the cost model", fix=fix)
            )
    missing = [name for name in GROUPS if name not in scalars]
    if missing:
        problems.append(Problem(where=where, what=f"scalars lacks {', '.join(missing)}", fix=CURE))
    return problems


def _values(scalars: Mapping[str, object], where: str) -> list[Problem]:
    problems = []
    for name, value in scalars.items():
        number = float(value) if _is_number(value) else math.nan
        if name in GROUPS and not 1 / MOST <= number <= MOST:
            what = f"scalars.{name} = {json.dumps(value)[:40]} is not a number from {1 / MOST:g} to {MOST:g}"
            why = "it multiplies a part of the step; 1 leaves it as it was"
            problems.append(Problem(where=where, what=what, why=why, fix=CURE))
    return problems


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
