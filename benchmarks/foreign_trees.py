"""What a configuration file of a public repository says, by a small mapping of our own from the trainers' manuals.

The truth that `benchmarks/foreign_blind.py` holds the product against: it shares no code with the readers. Values that
the manual leaves to the launcher or to the number of devices are "?" and are not judged; `family` is by keys.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

KEYS = ("TP", "PP", "CP", "EP", "ZeRO", "recompute", "precision", "micro", "global")
Truth = tuple[str, dict[str, Any]]  # family, values; the family "none" has none


def truth_of_tree(path: Path) -> Truth:
    """The family of a TOML, YAML or JSON file and its values; raises ValueError where the file cannot be parsed."""
    text = path.read_text(errors="replace")
    if path.suffix == ".toml":
        tree: Any = tomllib.loads(text)
    elif path.suffix == ".json":
        tree = json.loads(text)
    else:
        import yaml

        try:
            tree = yaml.safe_load(text)
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(str(error)) from error
    if not isinstance(tree, dict):
        return "none", {}
    if path.suffix == ".toml":
        return _torchtitan(tree)
    if path.suffix == ".json":
        return _deepspeed(tree)
    flat = {str(key).replace("-", "_"): value for key, value in tree.items()}
    for reader in (_gpt_neox, _nanotron, _accelerate, _axolotl, _llama_factory, _megatron_test, _nemo):
        family, values = reader(flat)
        if family != "none":
            return family, values
    return "none", {}


def _table(tree: Any, *names: str) -> dict[str, Any]:
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _number(value: Any, default: Any = 1) -> Any:
    """A whole number, the default where nothing is said, "?" for texts such as ${…} and auto."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        return int(value) if isinstance(value, str) and value.isdigit() else "?"
    return value


def _values(**given: Any) -> dict[str, Any]:
    return {**dict.fromkeys(KEYS, "?"), **given}


def _torchtitan(tree: dict[str, Any]) -> Truth:
    """torchtitan/config/job_config.py and its predecessors."""
    training, split = _table(tree, "training"), _table(tree, "parallelism")
    old = _table(tree, "experimental")
    if not training or not ({"seq_len", "steps"} & training.keys()):
        return "none", {}

    def degree(name: str) -> Any:
        for table in (split, training, old):
            if name in table:
                return _number(table[name])
        return 1

    shard = degree("data_parallel_shard_degree")
    if not any("data_parallel_shard_degree" in one for one in (split, training)):
        shard = degree("data_parallel_degree") if "data_parallel_degree" in training else -1
    mode = _table(tree, "activation_checkpoint").get("mode", "selective")
    option = str(_table(tree, "activation_checkpoint").get("selective_ac_option", "op"))
    if mode == "selective" and option.isdigit():
        mode = "full"  # of every n-th layer
    converters = _table(tree, "model").get("converters", [])
    names = converters if isinstance(converters, list) else [converters]
    eight = any("float8" in str(one) or "mx" in str(one) for one in names)
    eight = eight or bool(_table(tree, "float8").get("enable_float8_linear"))
    reshard = split.get("fsdp_reshard_after_forward", "default")
    stage: Any = "?" if shard == 1 or reshard != "default" else 3
    if degree("pipeline_parallel_degree") != 1:
        stage = "?"  # "default" keeps whole weights with a pipeline: ZeRO-2
    batch = training.get("local_batch_size", training.get("batch_size"))
    if degree("pipeline_parallel_degree") != 1:  # the local batch is cut for the pipeline
        batch = split.get("pipeline_parallel_microbatch_size", "?")
    whole = _number(training.get("global_batch_size"), "?")
    return "torchtitan", _values(
        TP=degree("tensor_parallel_degree"),
        PP=degree("pipeline_parallel_degree"),
        CP=degree("context_parallel_degree"),
        EP=degree("expert_parallel_degree"),
        ZeRO=stage,
        recompute=mode if mode in ("none", "selective", "full") else "?",
        precision="?"
        if training.get("mixed_precision_param", "bfloat16") != "bfloat16"
        else "fp8"
        if eight
        else "bf16",
        micro=_number(batch, "?"),
        **{"global": "?" if whole == -1 else whole},
    )


def _deepspeed(tree: dict[str, Any]) -> Truth:
    """www.deepspeed.ai/docs/config-json."""
    if not ({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & tree.keys()):
        return "none", {}
    zero = tree.get("zero_optimization", {})
    stage = _number(zero.get("stage", 0), 0) if isinstance(zero, dict) else int(bool(zero))
    half = {name: _table(tree, name).get("enabled", False) for name in ("bf16", "bfloat16", "fp16")}
    precision = "fp32"
    if "auto" in half.values() or any(isinstance(one, str) for one in half.values()):
        precision = "?"
    elif half["bf16"] or half["bfloat16"]:
        precision = "?" if half["fp16"] else "bf16"
    elif half["fp16"]:
        precision = "fp16"
    return "deepspeed", _values(
        TP="?",  # the model's matter
        PP="?",
        CP="?",
        EP="?",
        ZeRO=stage,
        precision=precision,
        micro=_number(tree.get("train_micro_batch_size_per_gpu"), "?"),
        **{"global": _number(tree.get("train_batch_size"), "?")},
    )


def _gpt_neox(tree: dict[str, Any]) -> Truth:
    """gpt-neox/configs/neox_arguments.md."""
    if not ({"pipe_parallel_size", "model_parallel_size"} & tree.keys()) or "num_layers" not in tree:
        return "none", {}
    half = {name: _table(tree, name) for name in ("fp16", "bf16")}
    precision = str(tree.get("precision", ""))
    if precision in ("bfloat16", "bf16") or half["bf16"].get("enabled"):
        precision = "bf16"
    elif precision in ("fp16",) or half["fp16"].get("fp16") or half["fp16"].get("enabled"):
        precision = "fp16"
    else:
        precision = "fp32"
    if half["fp16"].get("type") == "bfloat16":
        precision = "bf16"
    return "gpt-neox", _values(
        TP=_number(tree.get("model_parallel_size")),
        PP=max(1, _number(tree.get("pipe_parallel_size", 1))),
        CP=1,
        EP="?",
        ZeRO=_number(_table(tree, "zero_optimization").get("stage"), 0),
        recompute="full" if tree.get("checkpoint_activations") else "none",
        precision=precision,
        micro=_number(tree.get("train_micro_batch_size_per_gpu"), "?"),
        **{"global": _number(tree.get("train_batch_size"), "?")},
    )


def _nanotron(tree: dict[str, Any]) -> Truth:
    """nanotron/src/nanotron/config."""
    split, tokens = _table(tree, "parallelism"), _table(tree, "tokens")
    if "tp" not in split or "micro_batch_size" not in tokens:
        return "none", {}
    ranks = _number(split.get("dp"), "?")
    micro, steps = _number(tokens["micro_batch_size"]), _number(tokens.get("batch_accumulation_per_replica"))
    known = "?" not in (ranks, micro, steps)
    kind = _table(tree, "model").get("dtype", "bfloat16")
    return "nanotron", _values(
        TP=_number(split["tp"]),
        PP=_number(split.get("pp")),
        CP=_number(split.get("context_parallel_size")),
        EP=_number(split.get("expert_parallel_size")),
        ZeRO=_number(_table(tree, "optimizer").get("zero_stage"), 0),
        recompute="full" if split.get("recompute_layer") else "none",
        precision={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(kind), "?"),
        micro=micro,
        **{"global": ranks * micro * steps if known else "?"},
    )


def _accelerate(tree: dict[str, Any]) -> Truth:
    """huggingface.co/docs/accelerate: the configuration that `accelerate config` writes."""
    kind = str(tree.get("distributed_type", "")).upper()
    if not kind:
        return "none", {}
    stage: Any = "?" if kind == "MEGATRON_LM" else 0  # its degrees stand in megatron_lm_config
    recompute: Any = "?"
    if kind == "DEEPSPEED":
        stage = _number(_table(tree, "deepspeed_config").get("zero_stage"), "?")
    elif kind == "FSDP":
        full = _table(tree, "fsdp_config")
        word = str(full.get("fsdp_sharding_strategy", full.get("fsdp_reshard_after_forward", True))).upper()
        stage = {"FULL_SHARD": 3, "1": 3, "TRUE": 3, "SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "NO_SHARD": 0}.get(
            word, "?"
        )
        if word == "3":
            stage = 0
        recompute = "full" if full.get("fsdp_activation_checkpointing") is True else "?"
    words = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
    return "accelerate", _values(
        TP="?"
        if kind == "MEGATRON_LM"
        else _number(_table(tree, "parallelism_config").get("parallelism_config_tp_size")),
        PP="?" if kind == "MEGATRON_LM" else 1,
        ZeRO=stage,
        recompute=recompute,
        precision=words.get(str(tree.get("mixed_precision", "no")).lower(), "?"),
    )


def _finetuning_stage(word: Any) -> Any:
    """By the name of the JSON that ships with both trainers."""
    if word in (None, "", False):
        return 0
    return next((n for n in (3, 2, 1, 0) if f"zero{n}" in str(word) or f"z{n}" in str(word)), "?")


def _axolotl(tree: dict[str, Any]) -> Truth:
    """docs.axolotl.ai/docs/config-reference."""
    if "base_model" not in tree or not ({"sequence_len", "micro_batch_size", "datasets"} & tree.keys()):
        return "none", {}
    sharded = ("fsdp" in tree and tree["fsdp"]) or ("fsdp_config" in tree and tree["fsdp_config"])
    half = tree.get("bf16")
    precision = "bf16" if half in (True, "true", "full") else "fp16" if tree.get("fp16") is True else "?"
    return "axolotl", _values(
        TP=_number(tree.get("tensor_parallel_size")),
        PP=1,
        CP=_number(tree.get("context_parallel_size", tree.get("sequence_parallel_degree"))),
        ZeRO="?" if sharded else _finetuning_stage(tree.get("deepspeed")),
        recompute="full" if tree.get("gradient_checkpointing") in (True, "true", "unsloth", "offload") else "none",
        precision=precision,
        micro=_number(tree.get("micro_batch_size"), "?"),
    )


def _llama_factory(tree: dict[str, Any]) -> Truth:
    """llamafactory.readthedocs.io: arguments."""
    if "model_name_or_path" not in tree or not ({"finetuning_type", "cutoff_len", "template"} & tree.keys()):
        return "none", {}
    if "stage" not in tree and "finetuning_type" not in tree:
        return "none", {}
    return "llama-factory", _values(
        TP=1,
        PP=1,
        ZeRO="?" if tree.get("fsdp") else _finetuning_stage(tree.get("deepspeed")),
        recompute="none" if tree.get("disable_gradient_checkpointing") is True else "full",
        precision="bf16"
        if tree.get("bf16") is True or tree.get("pure_bf16") is True
        else "fp16"
        if tree.get("fp16") is True
        else "?",
        micro=_number(tree.get("per_device_train_batch_size"), "?"),
    )


def _megatron_test(tree: dict[str, Any]) -> Truth:
    """Megatron's own test recipes: its arguments under MODEL_ARGS."""
    given = _table(tree, "MODEL_ARGS")
    if not given:
        return "none", {}
    flags = {key.removeprefix("--").replace("-", "_"): value for key, value in given.items()}

    def on(name: str) -> bool:
        return flags.get(name) not in (None, False)

    recompute = "selective" if on("recompute_activations") else "none"
    if str(flags.get("recompute_granularity")) in ("full", "selective"):
        recompute = str(flags["recompute_granularity"])
    fsdp = on("use_custom_fsdp") or on("use_megatron_fsdp") or on("use_torch_fsdp2")
    eight = on("fp8_format") or on("fp8")
    return "megatron", _values(
        TP=_number(flags.get("tensor_model_parallel_size")),
        PP=_number(flags.get("pipeline_model_parallel_size")),
        CP=_number(flags.get("context_parallel_size")),
        EP=_number(flags.get("expert_model_parallel_size")),
        ZeRO="?" if fsdp else int(on("use_distributed_optimizer")),
        recompute=recompute,
        precision="fp8" if eight else "bf16" if on("bf16") else "fp16" if on("fp16") else "fp32",
        micro=_number(flags.get("micro_batch_size"), "?"),
        **{"global": _number(flags.get("global_batch_size"), "?")},
    )


def _nemo(tree: dict[str, Any]) -> Truth:
    """NeMo 1: docs.nvidia.com/nemo-framework, megatron_gpt_config.yaml."""
    model = _table(tree, "model")
    if "trainer" not in tree or "tensor_model_parallel_size" not in model:
        return "none", {}
    name = str(_table(model, "optim").get("name", ""))
    grain = model.get("activations_checkpoint_granularity")
    word = str(_table(tree, "trainer").get("precision", "")).replace("-mixed", "")
    eight = model.get("fp8") is True
    return "nemo", _values(
        TP=_number(model.get("tensor_model_parallel_size")),
        PP=_number(model.get("pipeline_model_parallel_size")),
        CP=_number(model.get("context_parallel_size")),
        EP=_number(model.get("expert_model_parallel_size")),
        ZeRO="?"
        if not name or "$" in name
        else 1
        if name in ("distributed_fused_adam", "mcore_distributed_optim")
        else 0,
        recompute=str(grain) if grain in ("full", "selective") else "none" if grain is None else "?",
        precision="fp8" if eight else {"bf16": "bf16", "16": "fp16", "32": "fp32"}.get(word, "?"),
        micro=_number(model.get("micro_batch_size"), "?"),
        **{"global": _number(model.get("global_batch_size"), "?")},
    )
