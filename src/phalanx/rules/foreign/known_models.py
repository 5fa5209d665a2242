"""Public models by their names in other trainers' files (known_models.toml), as presets or shapes of the job schema."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from phalanx.io.files import shipped_text
from phalanx.rules.foreign.conversion import Conversion

# Models that are built around a known one: their additional parts are not in its shape.
_MORE = re.compile(
    # weights in few bits, or pruned: another model to train
    r"(?<![a-z0-9])(w\d+a\d+|gptq|awq|gguf|bnb|nf4|int[48]|[48]-?bits?|fp[48]|mxfp4|nvfp4|pruned|sparse)(?![a-z0-9])"
    r"|llava|vision|sharegpt4v|audio|omni|(?<![a-z0-9])(vl|vlm|mm|video)(?![a-z0-9])"
)
# A known model with other sizes is another model (model_config and overrides_of_model_config of Axolotl, and
# similar ones).
_CHANGES = re.compile(r"(--)?(overrides_of_model_config|model_config|config_overrides|override_config)[._]")
_SIZES = re.compile(r"hidden_size|layers|heads|intermediate_size|experts|vocab_size")
GIVE_SHAPE = "give --set model.hf_config=config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A public model: a preset of the job schema, or the sizes of its [model] section."""

    name: str
    preset: str = ""
    shape: Mapping[str, object] = field(default_factory=dict)
    hugging_face: str = ""  # a regular expression for the end of its name on Hugging Face
    nemo: tuple[str, ...] = ()  # class names
    torchtitan: tuple[str, ...] = ()  # "model flavour"


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all known models, in the order of the file."""
    table = tomllib.loads(shipped_text(__file__, "known_models.toml"))
    return tuple(
        KnownModel(
            name=name,
            preset=entry.get("preset", ""),
            shape=entry.get("shape", {}),
            hugging_face=entry.get("hugging_face", ""),
            nemo=tuple(entry.get("nemo", ())),
            torchtitan=tuple(entry.get("torchtitan", ())),
        )
        for name, entry in table.items()
    )


def model_of_hugging_face(name: str) -> KnownModel | None:
    """Return the model of a Hugging Face name, or of a folder with that name; None if it is not known.

    A size is anchored: a 1B is never mistaken for a 1.5B, nor a Qwen2.5-VL for a Qwen2.5.

    >>> model_of_hugging_face("NousResearch/Meta-Llama-3.1-8B-Instruct").name
    'llama-3-8b'
    >>> model_of_hugging_face("Qwen/Qwen2.5-VL-7B-Instruct") is None
    True
    """
    short_name = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")[:200]
    for model in () if _MORE.search(short_name) else known_models():
        if model.hugging_face and re.search(rf"(?<![a-z0-9]){model.hugging_face}(?![\d.])", short_name):
            return model
    return None


def model_of_class(name: str) -> KnownModel | None:
    """Return the model of a configuration class of NeMo 2 or Megatron-Bridge.

    >>> model_of_class("Llama32ModelProvider1B").name, model_of_class("MyConfig")
    ('llama-3.2-1b', None)
    """
    class_name = name.replace("ModelProvider", "Config")
    return next((model for model in known_models() if class_name in model.nemo), None)


def model_of_flavour(model: str, flavour: str) -> KnownModel | None:
    """Return the model of a flavour of torchtitan, both in lower case."""
    return next((known_model for known_model in known_models() if f"{model} {flavour}" in known_model.torchtitan), None)


def set_known_model(config: Conversion, model: KnownModel, *names: str, note: str = "") -> None:
    """Set the [model] section to a known model."""
    if model.preset:
        config.set_value("model.preset", model.preset, *names, note=note)
        return
    for key, value in model.shape.items():
        config.set_value(f"model.{key}", value, *names, note=note or model.name)
    config.set_value("model.name", re.sub(r"[^a-z0-9-]", "-", model.name), *names, note=note or model.name)


def read_named_model(config: Conversion, key: str) -> None:
    """Set the [model] section from a name on Hugging Face."""
    leaf = config.find_leaf(key)
    if leaf is None:
        return
    changing_key = next(
        (leaf_key for leaf_key in config.leaves if _CHANGES.match(leaf_key) and _SIZES.search(leaf_key)), ""
    )
    if changing_key:
        config.leave_unmapped(key, f"{changing_key} changes its shape: {GIVE_SHAPE}")
    elif model := model_of_hugging_face(str(leaf.value)):
        set_known_model(config, model, key)
    else:
        config.leave_unmapped(key, f"no model of this name is known: {GIVE_SHAPE}")
