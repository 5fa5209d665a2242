"""Values as JSON answers: nothing that JSON cannot hold, and no path of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.io.codec import json_text
from phalanx.record.archive.history import Damage
from phalanx.web.run_store import NotYetError

Json = dict[str, Any]
MOST_TOLD = 100  # damaged things in one answer


class AnswerParts:
    """Reads an answer piece by piece: a piece that fails is left out and told of, the others are still given."""

    def __init__(self) -> None:
        self.damage: list[Json] = []

    def read(self, where: str, work: Callable[[], Any], otherwise: Any = None) -> Any:
        """What `work` gives, or `otherwise`."""
        try:
            return work()
        except Exception as error:  # everything in a run folder may be damaged in ways nobody thought of
            self.add(where, _error_text(error))
            return otherwise

    def add(self, where: str, what: str, count: int = 1) -> None:
        """Note something that is missing or damaged, once: several pieces of an answer may need the same file."""
        for one in self.damage:
            if (one["where"], one["what"]) == (where, what):
                one["count"] = max(one["count"], count)
                return
        self.damage.append({"where": where, "what": what, "count": count})

    def note(self, found: Sequence[Damage]) -> None:
        """Take over what a RunHistory says is damaged."""
        for one in found[:MOST_TOLD]:
            self.add(one.where, one.what, one.count)
        if len(found) > MOST_TOLD:
            self.add("", "more is damaged in the same way", len(found) - MOST_TOLD)


def _error_text(error: Exception) -> str:
    """In words that name no path of the machine: of a foreign exception only its kind."""
    if isinstance(error, PhalanxError):
        return error.problems[0].what[:300]
    if isinstance(error, NotYetError):
        return "is still being worked out; ask again in a moment"
    return f"cannot be read ({(isinstance(error, OSError) and error.strerror) or type(error).__name__})"


def encode_answer(value: Any, *, root: Path) -> bytes:
    """One JSON document; infinities and NaN become null, the root's own path is cut from every text."""
    text = json_text(value)
    for path in {str(root.absolute()), str(root.resolve())}:
        if len(path) > 1:
            text = text.replace(json_text(path)[1:-1] + "/", "")
    # "replace": a lone surrogate, which a damaged line may hold, has no UTF-8.
    return text.encode("utf-8", "replace")
