"""Models of OLMo-core's factories: `TransformerConfig.olmo2_7B(vocab_size=…)`, `llama_like(d_model=…, …)`.

Sizes and the rule for the feed-forward width are those of nn/transformer/config.py.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.rules.foreign.conversion import Conversion


class Factory(NamedTuple):
    """The arguments that a factory passes to `llama_like`."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int = 0  # 0: as many as heads
    multiplier: float = 1.0  # hidden_size_multiplier
    multiple_of: int = 256  # hidden_size_multiple_of


LLAMA = {
    "llama2_271M": Factory(1024, 16, 8),
    "llama2_1B": Factory(2048, 18, 16),
    "llama2_7B": Factory(4096, 32, 32),
    "llama2_13B": Factory(5120, 40, 40),
    "llama2_26B": Factory(5120, 80, 40),
    "llama2_70B": Factory(8192, 80, 64, 8, 1.3, 4096),
    "llama3_1B": Factory(2048, 16, 32, 8, 1.5),
    "llama3_8B": Factory(4096, 32, 32, 8, 1.3, 1024),
    "llama3_405B": Factory(16384, 126, 128, 8, 1.2, 4096),
}
OLMO = {
    "1M": Factory(12, 4, 4),
    "14M": Factory(128, 4, 8),
    "30M": Factory(256, 4, 8),
    "60M": Factory(384, 8, 8, 0, 1.5),
    "100M": Factory(512, 12, 8, 0, 1.5),
    "190M": Factory(768, 12, 12, 0, 1.5),
    "370M": Factory(1024, 16, 16, 0, 1.5),
    "760M": Factory(1536, 16, 16, 0, 1.5),
    "3B": Factory(3328, 16, 16, 0, 1.5),
    "7B": Factory(4096, 32, 32),
    "13B": Factory(5120, 40, 40),
    "32B": Factory(5120, 64, 40, 8, 27648 / (8 * 5120 / 3), 512),
}
FACTORIES = {
    **LLAMA,
    **{f"olmo{edition}_{size}": factory for size, factory in OLMO.items() for edition in (2, 3)},
    "olmo2_600M": Factory(1344, 16, 16, 0, 1.5),
    "olmo3_600M": Factory(1280, 16, 16, 0, 1.5),
    "olmo2_1B": Factory(2048, 18, 16, 0, 1.5),
    "olmo2_1B_v2": Factory(2048, 16, 16, 0, 1.5),
    "olmo3_1B": Factory(2048, 16, 16, 0, 1.5),
}
GENERAL = ("llama_like", "llama_like_moe")
# (experts, experts per token, width of each as a share of d_model, width of the shared expert likewise)
MOE = {"smallmoe": (Factory(768, 12, 12), 32, 4, 0.5, 2.0), "olmoe_1B_7B": (Factory(2048, 16, 16), 64, 8, 0.5, 0.0)}
# Settings of a block that give it other layers.
OTHER_BLOCKS = ("block", "block_overrides", "block_pattern", "feed_forward_moe", "feed_forward")
T = "model._target_"
GIVE_SHAPE = "give --set model.hf_config=config.json"


def ffn_width(d_model: int, multiplier: float, multiple_of: int) -> int:
    """Return `llama_like`'s feed-forward width.

    >>> ffn_width(4096, 1.3, 1024), ffn_width(4096, 1.0, 256), ffn_width(2048, 1.5, 256)
    (14336, 11008, 8192)
    """
    width = int(8 * d_model / 3)
    width = int(multiplier * width) if multiplier != 1.0 else width
    return -(-width // multiple_of) * multiple_of


def read_olmo_model(config: Conversion) -> None:
    """Read [model] from a factory and the script's arguments to it; unmapped if its shape is not known."""
    leaf = config.leaves.get(T)
    if leaf is None:
        return
    name = str(leaf.value).rpartition(".")[2]
    fields = {key.removeprefix("model.").partition(".")[0] for key in config.leaves if key.startswith("model.")}
    unknown_leaf = next(
        (field for field in config.leaves.values() if field.key.startswith("model.") and field.unknown), None
    )
    if fields & set(OTHER_BLOCKS):
        config.leave_unmapped(T, f"the script gives its blocks other layers: {GIVE_SHAPE}")
    elif unknown_leaf is not None and unknown_leaf.key.rpartition(".")[2] in (*_SIZES, *_EXPERTS):
        config.leave_unmapped(T, f"{unknown_leaf.key} {unknown_leaf.unknown}: {GIVE_SHAPE}")
    elif name in FACTORIES:
        _set_shape(config, name, FACTORIES[name])
    elif name in MOE:
        base, experts, experts_per_token, width_share, shared_share = MOE[name]
        factory = _set_shape(config, name, base)
        _set_experts(
            config,
            name,
            experts,
            experts_per_token,
            int(width_share * factory.d_model),
            int(shared_share * factory.d_model),
        )
    elif name in GENERAL and all(config.read_whole(f"model.{field}") for field in ("d_model", "n_layers", "n_heads")):
        _set_shape(config, name, Factory(0, 0, 0))
        if name == "llama_like_moe":
            _read_moe(config, name)
    else:
        config.leave_unmapped(T, "the shape of this factory is code of OLMo-core's, which is not read")


_SIZES = ("d_model", "n_layers", "n_heads", "n_kv_heads", "hidden_size_multiplier", "hidden_size_multiple_of")
_EXPERTS = ("num_experts", "top_k", "expert_hidden_size", "shared_expert_hidden_size", "hybrid")


def _set_shape(config: Conversion, name: str, base: Factory) -> Factory:
    factory = Factory(
        d_model=config.read_whole("model.d_model") or base.d_model,
        n_layers=config.read_whole("model.n_layers") or base.n_layers,
        n_heads=config.read_whole("model.n_heads") or base.n_heads,
        n_kv_heads=config.read_whole("model.n_kv_heads") or base.n_kv_heads,
        multiplier=config.read_number("model.hidden_size_multiplier") or base.multiplier,
        multiple_of=config.read_whole("model.hidden_size_multiple_of") or base.multiple_of,
    )
    sizes = {
        "layers": (factory.n_layers, "n_layers"),
        "hidden": (factory.d_model, "d_model"),
        "heads": (factory.n_heads, "n_heads"),
        "kv_heads": (factory.n_kv_heads or factory.n_heads, "n_kv_heads"),
        "ffn": (ffn_width(factory.d_model, factory.multiplier, factory.multiple_of), "hidden_size_multiplier"),
    }
    for key, (value, field) in sizes.items():
        config.set_value(f"model.{key}", value, f"model.{field}", T, note=name)
    for key in ("model.vocab_size", "model._args_.0"):
        if (vocabulary := config.read_whole(key)) and "model.vocab" not in config.values:
            config.set_value("model.vocab", vocabulary, key)
    if (qk := config.read_flag("model.qk_norm")) is not None or name.startswith("olmo"):
        config.set_value("model.qk_norm", qk is not False, "model.qk_norm", T)
    theta = config.read_number("model.rope_theta") or (10_000.0 if name.startswith("llama2") else 500_000.0)
    config.set_value("model.rope_theta", theta, "model.rope_theta", T, note=name)
    return factory


def _set_experts(config: Conversion, name: str, experts: int, chosen: int, width: int, shared: int) -> None:
    values = {"experts": experts, "experts_per_token": chosen, "expert_ffn": width, "balance": "aux"}
    if shared:
        values["shared_experts"] = max(1, shared // width)
    for key, value in values.items():
        config.set_value(f"model.{key}", value, T, note=name)


def _read_moe(config: Conversion, name: str) -> None:
    experts, experts_per_token, width, shared = (config.read_whole(f"model.{field}") for field in _EXPERTS[:4])
    if not (experts and experts_per_token and width) or config.read_flag("model.hybrid"):
        for key in [key for key in config.values if key.startswith("model.")]:
            del config.values[key]
        config.leave_unmapped(T, f"its experts are not known, or stand beside a dense layer: {GIVE_SHAPE}")
        return
    _set_experts(config, name, experts, experts_per_token, width, shared or 0)
