"""The [model] section: a preset or a config.json, keys of the job file that override it, and derived values."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

from phalanx.errors import UserError, nearest
from phalanx.io import limits
from phalanx.job import key_rules as rules
from phalanx.job.draft import DEFAULT, Draft, Origin
from phalanx.job.key_rules import KeyRule, WrongValue, rule_of, shown_value
from phalanx.job.model import ModelShape, Preset, known_presets

_CHOICES = {
    "norm": ("rms", "layer"),
    "positions": ("rope", "learned", "alibi"),
    "activation": ("silu", "gelu", "gelu_tanh"),
    "rope_scaling": ("none", "linear", "llama3", "yarn"),
    "router_score": ("softmax", "sigmoid"),
    "balance": ("none", "aux", "bias"),
}
_NUMBERS = {
    "norm_eps": rules.number("keeps a norm from dividing by zero", above=True, most=1.0),
    "rope_theta": rules.number("base of the rotary wavelengths", least=1.0, above=True, most=1e12),
    "rope_factor": rules.number("how many times longer the context becomes", least=1.0, most=1e6),
    "rope_low_factor": rules.number("wavelengths above original / low are stretched in full", above=True, most=1e6),
    "rope_high_factor": rules.number("wavelengths below original / high are left alone", above=True, most=1e6),
    "routed_scale": rules.number("factor on what the routed experts add", above=True, most=1e6),
    "balance_rate": rules.number("coefficient of the loss, or step of the bias", most=1e3),
}
_MOST = {
    "layers": limits.MAX_LAYERS,
    "dense_layers": limits.MAX_LAYERS,
    "hidden": limits.MAX_WIDTH,
    "ffn": limits.MAX_WIDTH,
    "expert_ffn": limits.MAX_WIDTH,
    "q_lora_rank": limits.MAX_WIDTH,
    "kv_lora_rank": limits.MAX_WIDTH,
    "heads": limits.MAX_HEADS,
    "kv_heads": limits.MAX_HEADS,
    "head_dim": limits.MAX_HEAD_DIM,
    "qk_nope_dim": limits.MAX_HEAD_DIM,
    "qk_rope_dim": limits.MAX_HEAD_DIM,
    "v_head_dim": limits.MAX_HEAD_DIM,
    "vocab": limits.MAX_VOCAB,
    "experts": limits.MAX_EXPERTS,
    "experts_per_token": limits.MAX_EXPERTS,
    "shared_experts": limits.MAX_EXPERTS,
    "max_positions": limits.MAX_SEQUENCE,
    "sliding_window": limits.MAX_SEQUENCE,
    "rope_original_positions": limits.MAX_SEQUENCE,
}
# "file.py:build", "package.module:build", the name of an entry point, or empty. A file without a function is not an
# entry point.
MODULE_PATTERN = r"(?:[^:]+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*|[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?<!\.py)|"
MOST_ARGUMENTS = 100_000  # characters


@cache
def shape_rules() -> dict[str, KeyRule]:
    """Return a rule for every key of ModelShape, from its type; sizes without a default must be at least 1."""
    return {item.name: _shape_rule(item.name, str(item.type), item.default is MISSING) for item in fields(ModelShape)}


def _shape_rule(name: str, kind: str, required: bool) -> KeyRule:
    if name in _CHOICES:
        return rule_of(rules.choice("", *_CHOICES[name]))
    if name in _NUMBERS:
        return rule_of(_NUMBERS[name])
    if name == "module":
        expects = '"file.py:function", "package.module:function" or the name of an entry point'
        return rule_of(rules.text("code that builds the network", pattern=MODULE_PATTERN, expects=expects))
    if name == "arguments":
        return KeyRule(
            expects="a table of plain values", read=_read_arguments, note="what the module's function receives"
        )
    if kind == "bool":
        return rule_of(rules.flag(""))
    if kind == "int":
        return rule_of(rules.count("", least=1 if required else 0, most=_MOST[name]))
    return rule_of(rules.text(""))


def _read_arguments(value: object) -> object:
    """Return a table as JSON text, so that a shape holds only plain values; JSON text is accepted as well."""
    if value == "":
        return value
    try:
        table = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(table, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongValue("holds what JSON cannot: a date, nan or infinity") from error
    if not isinstance(table, dict):
        raise WrongValue(f"is {rules.value_kind(value)}, not a table")
    if len(text) > MOST_ARGUMENTS:
        raise WrongValue(f"is longer than {MOST_ARGUMENTS:,} characters")
    return text


def resolve_preset(draft: Draft) -> Preset | None:
    """Return the preset that the job names; None if it names none or an unknown one."""
    name = draft.section("model").get("preset")
    if name is None:
        return None
    presets = known_presets()
    if isinstance(name, str) and name in presets:
        draft.origins["model.preset"] = draft.written("model.preset")
        return presets[name]
    suggestion = nearest(name, presets) if isinstance(name, str) else ""
    fix = f'did you mean "{suggestion}"?' if suggestion else f"the known models are {', '.join(presets)}"
    draft.complain("model.preset", f"model.preset = {shown_value(name)} is not a known model", fix=fix)
    return None


def resolve_shape(draft: Draft, *, preset: Preset | None, job_name: str) -> ModelShape:
    """Return the model's shape; keys that were refused or are missing count as bad and get the value 1."""
    model_table = draft.section("model")
    rules_by_key = shape_rules()
    draft.refuse_unknown(("model",), model_table, {*rules_by_key, "preset", "hf_config"})
    values: dict[str, object] = {}
    base = _base_values(draft, preset, model_table)
    for name, rule in rules_by_key.items():
        key = f"model.{name}"
        if name in model_table:
            values[name] = draft.read(key, model_table[name], rule)
        elif name in base:
            value, origin = base[name]
            values[name] = draft.read(key, value, rule, origin=origin)
    _derive_values(draft, values, job_name=job_name)
    _refuse_missing(draft, values)
    _check_rope(draft, values)
    _check_own_code(draft, values)
    for item in fields(ModelShape):
        draft.origins.setdefault(f"model.{item.name}", DEFAULT)
    good_values = {name: value for name, value in values.items() if value is not None}
    return ModelShape(**(dict.fromkeys(_required_keys(), 1) | good_values))  # type: ignore[arg-type]


def shape_of_config(path: Path) -> ModelShape:
    """Return the shape that a config.json alone describes; raises UserError with everything wrong in it."""
    draft = Draft(path=path, table={"model": {"hf_config": path.name}}, lines={})
    shape = resolve_shape(draft, preset=None, job_name=path.parent.name or "model")
    if draft.problems:
        raise UserError(draft.problems)
    return shape


def _base_values(draft: Draft, preset: Preset | None, written: dict[str, object]) -> dict[str, tuple[object, Origin]]:
    """Return the keys that come from the preset or the config.json, with their origin."""
    if "preset" in written and "hf_config" in written:
        draft.complain("model.hf_config", "[model] names both a preset and an hf_config", fix="keep one of the two")
        return {}
    if preset is not None:
        origin = Origin(kind="preset", where=f"preset {preset.name}")
        return {"name": (preset.name, origin)} | {key: (value, origin) for key, value in preset.shape.items()}
    return _from_config(draft, written.get("hf_config"))


def _from_config(draft: Draft, name: object) -> dict[str, tuple[object, Origin]]:
    if name is None:
        return {}
    draft.origins["model.hf_config"] = draft.written("model.hf_config")
    if not isinstance(name, str) or not name:
        draft.complain(
            "model.hf_config", f"model.hf_config = {shown_value(name)} is not a file name", fix='use "config.json"'
        )
        return {}
    path = draft.path.parent / name
    try:
        from phalanx.job.hf_config import read_config

        shape = read_config(path)
    except UserError as error:
        draft.bad.add("model.hf_config")
        draft.problems.extend(error.problems)
        return {}
    origin = Origin(kind="hf_config", where=str(path))
    return {key: (value, origin) for key, value in shape.items()}


def _derive_values(draft: Draft, values: dict[str, object], *, job_name: str) -> None:
    """Fill in values that follow from other keys; a refused key (None) derives nothing."""

    def put(name: str, value: object, where: str) -> None:
        if name not in values and value is not None:
            values[name] = value
            draft.origins[f"model.{name}"] = Origin(kind="derived", where=where)

    put("name", job_name, "name of the job")
    put("kv_heads", values.get("heads"), "model.heads")
    hidden, heads = values.get("hidden"), values.get("heads")
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % heads == 0:
        put("head_dim", hidden // heads, "model.hidden / model.heads")
    if not values.get("dense_layers"):
        put("ffn", values.get("expert_ffn"), "model.expert_ffn")
    if values.get("gated") is False:
        put("activation", "gelu_tanh", "model.gated = false, as GPT-2")
    if values.get("experts"):
        # Without balancing, routers send nearly all tokens to a few experts (arXiv:1701.06538 section 4).
        has_router_bias = values.get("router_bias") is True
        put(
            "balance", "bias" if has_router_bias else "aux", "model.router_bias" if has_router_bias else "model.experts"
        )
        put("router_bias", True if values.get("balance") == "bias" else None, 'model.balance = "bias"')


def _check_rope(draft: Draft, values: dict[str, object]) -> None:
    """Check that scaled rotary positions come with the original length, and that the factors are in order."""
    scaling, original = values.get("rope_scaling"), values.get("rope_original_positions", 0)
    if scaling in ("llama3", "yarn") and original == 0:
        draft.complain(
            "model.rope_scaling",
            f'model.rope_scaling = "{scaling}" without rope_original_positions',
            why="it stretches wavelengths relative to the length the model was first trained on",
            fix="give rope_original_positions, 8192 for Llama 3.1",
        )
    low, high = (values.get(f"rope_{end}_factor", default) for end, default in (("low", 1.0), ("high", 4.0)))
    if scaling == "llama3" and isinstance(low, float) and isinstance(high, float) and low >= high:
        draft.complain(
            "model.rope_high_factor",
            f"model.rope_high_factor = {high:g} is not above model.rope_low_factor = {low:g}",
            fix="Llama 3.1 uses 4 and 1",
        )


def _check_own_code(draft: Draft, values: dict[str, object]) -> None:
    """Check that arguments come with a custom module, the only code that takes them."""
    if values.get("arguments") and not values.get("module"):
        draft.complain(
            "model.arguments",
            "model.arguments without model.module",
            why="only a module of your own takes arguments",
            fix='name it, as module = "my_model.py:build"',
        )


def _required_keys() -> list[str]:
    return [item.name for item in fields(ModelShape) if item.default is MISSING]


def _refuse_missing(draft: Draft, values: dict[str, object]) -> None:
    missing = [name for name in _required_keys() if name not in values]
    if missing and not draft.bad & {"model", "model.preset", "model.hf_config", "model.heads", "model.hidden"}:
        draft.complain(
            "model",
            f"[model] does not say {', '.join(missing)}",
            why="the planner counts from the shape",
            fix='name a known model, as preset = "llama-3-8b"; or a hf_config = "config.json"; or give these keys',
        )
    draft.bad |= {f"model.{name}" for name in missing}
