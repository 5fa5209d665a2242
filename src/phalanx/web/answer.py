"""Build JSON answers: values that JSON can represent, and no paths of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.io.codec import json_text
from phalanx.record.archive.history import Damage
from phalanx.web.run_store import NotYetError

Json = dict[str, Any]
MOST_TOLD = 100  # problems in one answer


class AnswerParts:
    """Reads an answer in parts: one that fails is left out and listed in `damage`, the others are returned."""

    def __init__(self) -> None:
        self.damage: list[Json] = []

    def read(self, where: str, work: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return the result of `work`, or `otherwise` if it raises."""
        try:
            return work()
        except Exception as error:  # a damaged run folder can cause any exception
            self.add(where, _error_text(error))
            return otherwise

    def add(self, where: str, what: str, count: int = 1) -> None:
        """Record a missing or damaged item once: several parts of an answer may need the same file."""
        for item in self.damage:
            if (item["where"], item["what"]) == (where, what):
                item["count"] = max(item["count"], count)
                return
        self.damage.append({"where": where, "what": what, "count": count})

    def note(self, found: Sequence[Damage]) -> None:
        """Record the damage that a RunHistory found."""
        for item in found[:MOST_TOLD]:
            self.add(item.where, item.what, item.count)
        if len(found) > MOST_TOLD:
            self.add("", "more is damaged in the same way", len(found) - MOST_TOLD)


def _error_text(error: Exception) -> str:
    """Describe an error without any path of the machine: of an exception from other libraries only its type."""
    if isinstance(error, PhalanxError):
        return error.problems[0].what[:300]
    if isinstance(error, NotYetError):
        return "is still being worked out; ask again in a moment"
    return f"cannot be read ({(isinstance(error, OSError) and error.strerror) or type(error).__name__})"


def encode_answer(value: Any, *, root: Path) -> bytes:
    """Return the value as one JSON document.

    Infinities and NaN become null, and the root's path is removed from texts.
    """
    text = json_text(value)
    for path in {str(root.absolute()), str(root.resolve())}:
        if len(path) > 1:
            text = text.replace(json_text(path)[1:-1] + "/", "")
    # "replace": a lone surrogate, which a damaged line may contain, has no UTF-8 encoding.
    return text.encode("utf-8", "replace")
