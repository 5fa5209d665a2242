"""Models by the names people give them in configurations, as presets of ours."""

from __future__ import annotations

import re

from phalanx.rules.foreign.conversion import Conversion

# Hugging Face's names; anchored at the size, so that a 1B is never taken for a 1.5B.
_NAMES: tuple[tuple[str, str], ...] = (
    (r"llama-?3(\.1)?-405b", "llama-3.1-405b"),
    (r"llama-?3(\.[13])?-70b", "llama-3-70b"),
    (r"llama-?3(\.1)?-8b", "llama-3-8b"),
    (r"llama-?2-70b", "llama-2-70b"),
    (r"llama-?2-13b", "llama-2-13b"),
    (r"llama-?2-7b", "llama-2-7b"),
    (r"qwen3-235b-a22b", "qwen3-235b-a22b"),
    (r"qwen3-30b-a3b", "qwen3-30b-a3b"),
    (r"qwen3-32b", "qwen3-32b"),
    (r"qwen3-8b", "qwen3-8b"),
    (r"deepseek-v3", "deepseek-v3"),
)


def preset_of(name: str) -> str:
    """The preset of a model's name; empty where it is not known.

    >>> preset_of("NousResearch/Meta-Llama-3.1-8B-Instruct"), preset_of("Qwen/Qwen3-0.6B")
    ('llama-3-8b', '')
    """
    from phalanx.job.model import known_presets

    word = name.rpartition("/")[2].lower().replace("_", "-")[:200]
    found = next((preset for pattern, preset in _NAMES if re.search(rf"{pattern}(?![\d.])", word)), "")
    return found if found in known_presets() else ""


def read_named_model(config: Conversion, key: str) -> None:
    """[model] from a name."""
    leaf = config.find_leaf(key)
    if leaf is None:
        return
    if preset := preset_of(str(leaf.value)):
        config.set_value("model.preset", preset, key)
    else:
        config.leave_unmapped(key, "no preset of this name: give --set model.hf_config=config.json")
