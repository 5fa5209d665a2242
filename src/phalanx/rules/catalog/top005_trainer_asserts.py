"""TOP005: another trainer's file satisfies the conditions that this trainer asserts when it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.rules.evidence import Evidence, differs
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

NO_START = Impact(points=100.0, note="the trainer fails with an assertion after its devices were allocated")
# The setting it points at, what is wrong, what to do.
Broken = tuple[str, str, str]


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check every condition of the trainer against the settings of the file."""
    if not evidence.is_foreign:
        return (exempt("the reader of job files asks the same of a job"),)
    if any(
        setting.value == "???" for setting in evidence.settings.values()
    ):  # OmegaConf: the command line completes the file
        return (exempt("a template, whose numbers are places for others"),)
    broken = [*_formats(evidence), *_deepspeed(evidence), *_megatron(evidence), *_refused_json(evidence)]
    silent = all(problem.what.startswith("does not say") for problem in evidence.refusals)
    # With a plan, the planner, TOP001 and BAT001 have judged the layout. A fork that changes how steps are computed
    # may also count stages and batches differently.
    if evidence.plan is None and silent and not evidence.changed:
        broken += _divisors(evidence)
    idle = (*_without_effect(evidence), *_said_twice(evidence), *_against_json(evidence))
    if len(broken) <= limits.number("most_broken"):
        return idle or (passed("nothing that the trainer itself refuses", value=len(broken), threshold=0),)
    failures = (failed(message, at=f"setting:{name}", impact=NO_START, fix=fix) for name, message, fix in broken)
    return (*failures, *idle)


def _without_effect(evidence: Evidence) -> Iterator[Outcome]:
    """Yield settings that DeepSpeed silently ignores: offload_param needs stage 3 (runtime/zero/config.py)."""
    name = "zero_optimization.offload_param.device"
    offload, stage = evidence.find_setting(name), _whole(evidence, "zero_optimization.stage")
    is_set = offload is not None and str(offload.value) not in ("none", "auto")
    if evidence.practice.trainer == "deepspeed" and is_set and stage < 3:
        yield failed(
            f"offload_param has no effect: it needs ZeRO stage 3, and the stage is {stage}",
            at=f"setting:{name}",
            severity="warning",
            impact=Impact(note="no time lost, but the weights stay in the devices' memory"),
            fix="zero_optimization.stage = 3, or leave offload_param out",
        )


# Arguments, and their names in the DeepSpeed JSON that a script refers to.
AGAIN = (
    ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    ("micro_batch_size", "train_micro_batch_size_per_gpu"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("bf16", "bf16.enabled"),
    ("fp16", "fp16.enabled"),
)


def _contradictions(evidence: Evidence) -> Iterator[Broken]:
    for name, key in AGAIN:
        argument, json_setting = evidence.find_setting(name), evidence.find_setting(f"ds.{key}")
        if argument is not None and json_setting is not None and differs(argument.value, json_setting.value):
            message = (
                f"{argument.key[:60]} is {str(argument.value)[:20]}, "
                f"and {key} of the DeepSpeed JSON is {json_setting.value}"
            )
            yield name, message, f'the same in both, or {key} = "auto" where the Trainer fills it in'


def _refused_json(evidence: Evidence) -> Iterator[Broken]:
    """Yield contradictions that Hugging Face's Trainer refuses (integrations/deepspeed.py, fill_match)."""
    if evidence.practice.trainer == "transformers" and not evidence.open_why:
        yield from _contradictions(evidence)


def _against_json(evidence: Evidence) -> Iterator[Outcome]:
    """Yield contradictions of which other programs silently take one value."""
    if evidence.practice.trainer == "transformers" and not evidence.open_why:
        return
    for name, message, fix in _contradictions(evidence):
        effect = Impact(note="one of the two values has no effect")
        yield failed(message, at=f"setting:{name}", severity="warning", impact=effect, fix=fix)


# Settings on which the conditions of a layout depend: if one is left open, the conditions are open too.
DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_experts",
    "num_layers",
    "micro_batch_size",
    "global_batch_size",
)


def _has_open_degree(evidence: Evidence) -> bool:
    """Return whether a degree is an unset variable in the file, or not a plain number."""
    settings = (setting for name in DEGREES if (setting := evidence.find_setting(name)) is not None)
    return any(not re.fullmatch(r"\d+", str(setting.value).strip()) for setting in settings)


def _said_twice(evidence: Evidence) -> Iterator[Outcome]:
    """Yield settings that occur twice: PyYAML silently takes the last; OmegaConf (NeMo's files) refuses them."""
    for name, setting in evidence.settings.items():
        if not setting.earlier or name != setting.key:
            continue
        refuses = evidence.practice.trainer == "nemo"
        effect = "OmegaConf refuses it" if refuses else "the trainer takes the last and says nothing"
        yield failed(
            f"{(setting.twice or setting.key)[:60]} also stands on line {setting.earlier} with another value: {effect}",
            at=f"setting:{name}",
            severity="error" if refuses else "warning",
            impact=NO_START if refuses else Impact(note="one of the two values has no effect"),
            fix="keep one of the two",
        )


def _whole(evidence: Evidence, *names: str) -> int:
    """Return a setting as a whole number; 0 where the file has none."""
    value = evidence.setting_number(*names)
    return int(value) if value is not None and abs(value) < 1e15 and value == int(value) else 0


def _formats(evidence: Evidence) -> Iterator[Broken]:
    for half, brain in (("fp16", "bf16"), ("fp16.enabled", "bf16.enabled"), ("fp16.enabled", "bfloat16.enabled")):
        if evidence.setting_flag(half) and evidence.setting_flag(brain):
            yield half, "fp16 and bf16 are both on: a trainer computes in one of them", "turn one of the two off"
            return


def _deepspeed(evidence: Evidence) -> Iterator[Broken]:
    if evidence.practice.trainer != "deepspeed":
        return
    total, micro = _whole(evidence, "train_batch_size"), _whole(evidence, "train_micro_batch_size_per_gpu")
    passes = _whole(evidence, "gradient_accumulation_steps")
    degrees = evidence.the_job.parallel
    model_ranks = 1
    for degree in (degrees.tensor, degrees.pipeline, degrees.context):
        model_ranks *= degree if isinstance(degree, int) else 1
    ranks = evidence.known_devices // max(1, model_ranks)
    adds_up = not (total and micro and passes and ranks) or micro * passes * ranks == total
    if not adds_up and not _may_be_split(evidence, total, micro * passes, ranks):
        message = (
            f"train_batch_size {total:,} is not micro-batch {micro} × {passes} accumulation steps × {ranks:,} data "
            f"ranks = {micro * passes * ranks:,}"
        )
        yield (
            "train_batch_size",
            message,
            f"train_batch_size = {micro * passes * ranks:,}, or leave one of the three out",
        )
    elif total and (micro or passes) and total % max(1, micro * max(1, passes)):
        message = f"train_batch_size {total:,} is no multiple of micro-batch {max(1, micro)} × {max(1, passes)} passes"
        yield "train_batch_size", message, "make the three fit: batch = micro × accumulation × data ranks"
    yield from _deepspeed_words(evidence)
    stage = _whole(evidence, "zero_optimization.stage")
    if evidence.find_setting("zero_optimization.stage") is not None and not 0 <= stage <= 3:
        yield "zero_optimization.stage", f"there is no ZeRO stage {stage}", "0, 1, 2 or 3"


def _may_be_split(evidence: Evidence, total: int, share: int, ranks: int) -> bool:
    """Return whether the batch is right for a program that splits its model, which the JSON alone does not show."""
    if any(evidence.written(f"parallel.{name}") for name in ("tensor", "pipeline", "context", "data")):
        return False
    return total % share == 0 and ranks % (total // share) == 0


DEVICES = ("none", "cpu", "nvme", "auto")
# From runtime/lr_schedules.py of DeepSpeed; any other name is looked up in torch.optim.lr_scheduler.
SCHEDULES = (
    "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LambdaLR", "MultiplicativeLR",
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "SequentialLR", "CosineAnnealingLR",
    "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR",
    "LRScheduler",
)  # fmt: skip


def _deepspeed_words(evidence: Evidence) -> Iterator[Broken]:
    """Yield values that DeepSpeed refuses in its JSON: a boolean for a table, an unknown device or schedule."""
    for name in ("fp16", "bf16"):
        plain = evidence.find_setting(name)
        if plain is not None and plain.key == name and isinstance(plain.value, bool):
            literal = str(plain.value).lower()
            yield (
                name,
                f"{name} is {literal}, and DeepSpeed reads a table there",
                f'{{"{name}": {{"enabled": {literal}}}}}',
            )
    for kind in ("optimizer", "param"):
        name = f"zero_optimization.offload_{kind}.device"
        device = evidence.find_setting(name)
        if device is not None and device.value is not None and str(device.value) not in DEVICES:
            yield name, f"there is no device {str(device.value)[:20]!r} to offload to", "cpu, nvme or none"
    schedule = evidence.find_setting("scheduler.type")
    if schedule is not None and isinstance(schedule.value, str) and schedule.value not in (*SCHEDULES, "auto"):
        message = f"DeepSpeed has no scheduler {schedule.value[:30]!r}, nor has torch"
        yield "scheduler.type", message, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest"


def _megatron(evidence: Evidence) -> Iterator[Broken]:
    if evidence.practice.trainer not in ("megatron", "nemo"):
        return
    if evidence.practice.trainer == "megatron":
        yield from _arguments(evidence)
    if _has_open_degree(evidence) or evidence.changed:
        return
    tensor = _whole(evidence, "tensor_model_parallel_size") or 1
    stages, experts = _whole(evidence, "pipeline_model_parallel_size") or 1, _whole(evidence, "num_experts")
    chunked = "num_layers_per_virtual_pipeline_stage"
    chunks = _whole(evidence, "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    if stages == 1 and (chunks > 1 or _whole(evidence, chunked)):
        name = chunked if _whole(evidence, chunked) else "virtual_pipeline_model_parallel_size"
        yield name, "an interleaved schedule needs a pipeline, and there is one stage", "leave it out, or add stages"
    # Megatron-DeepSpeed has its own experts: it asserts nothing of the kind, and a dense model has one expert.
    asserts_experts = (
        not evidence.setting_flag("deepspeed") and evidence.find_setting("deepspeed_config", "zero_stage") is None
    )
    asserts_experts = asserts_experts and not evidence.open_why
    if experts > 1 and tensor > 1 and asserts_experts and not evidence.setting_flag("sequence_parallel"):
        message = f"experts with {tensor} tensor ranks and without sequence parallelism"
        yield "num_experts", message, "add sequence parallelism (--sequence-parallel)"
    # Without num_layers, the model's own class decides the number of experts.
    described = evidence.find_setting("num_layers") is not None and not evidence.open_why
    # The number may be a variable, or have a name of a fork.
    described = described and not any("experts" in canonical for canonical in evidence.settings)
    if _whole(evidence, "expert_model_parallel_size") > 1 and not experts and described:
        yield "expert_model_parallel_size", "expert ranks for a model without experts", "leave it out, or name experts"
    if experts and (top := _whole(evidence, "moe_router_topk")) > experts:
        yield "moe_router_topk", f"{top} experts per token of {experts}", "fewer experts per token"


def _arguments(evidence: Evidence) -> Iterator[Broken]:
    """Yield broken conditions of Megatron-LM's argument list: training/arguments.py, validate_args."""
    has = evidence.find_setting
    if _whole(evidence, "train_iters") and _whole(evidence, "train_samples"):
        yield "train_samples", "--train-iters and --train-samples exclude each other", "give one of the two"
    # An argument that is absent may come from elsewhere; a fork, known by its own arguments, may not require it.
    is_complete = not evidence.open_why and not any(setting.is_own_flag for setting in evidence.unmapped)
    # Without a tensor-parallel setting, --save may belong to another program.
    if is_complete and has("save") and not has("save_interval") and has("tensor_model_parallel_size"):
        yield "save", "--save without --save-interval", "give --save-interval"
    lowest, peak = evidence.setting_number("min_lr"), evidence.setting_number("lr")
    if lowest is not None and peak is not None and lowest > peak:
        yield "min_lr", f"--min-lr {lowest:g} is above --lr {peak:g}", "a lower --min-lr"
    reach, length = _whole(evidence, "max_position_embeddings"), _whole(evidence, "seq_length")
    if reach and length > reach:
        message = f"sequences of {length:,} tokens and {reach:,} positions"
        yield "seq_length", message, "--max-position-embeddings of at least the sequence length"
    shards = evidence.setting_flag("use_distributed_optimizer") or evidence.setting_flag("use_megatron_fsdp")
    if is_complete and evidence.setting_flag("overlap_param_gather") and not shards:
        message = "--overlap-param-gather without a distributed optimizer"
        yield "overlap_param_gather", message, "add --use-distributed-optimizer"
    full = has("recompute_granularity")
    # Together with it, --recompute-activations makes it selective.
    full = None if evidence.setting_flag("recompute_activations") else full
    if is_complete and full is not None and str(full.value) == "full" and not has("recompute_method"):
        message = "--recompute-granularity full without --recompute-method"
        yield "recompute_granularity", message, "--recompute-method uniform --recompute-num-layers 1"


def _head_count(evidence: Evidence) -> int:
    """Return the heads that share the hidden size; 1 where their width is given or a layer has none (mamba)."""
    kinds = [str(setting.value) for name, setting in evidence.settings.items() if name.startswith("attention_config")]
    own_width = evidence.find_setting("kv_channels", "head_dim") is not None
    if own_width or any(word in kind for kind in kinds for word in ("mamba", "rwkv")):
        return 1
    return _whole(evidence, "num_attention_heads") or 1


def _divisors(evidence: Evidence) -> Iterator[Broken]:
    """Yield sizes that must be divisible and are not, where there is no plan to judge them."""
    if evidence.practice.trainer in ("megatron", "nemo") and _has_open_degree(evidence):
        return
    tensor = _whole(evidence, "tensor_model_parallel_size", "parallelism.tensor_parallel_degree") or 1
    stages = _whole(evidence, "pipeline_model_parallel_size", "parallelism.pipeline_parallel_degree") or 1
    context = _whole(evidence, "context_parallel_size", "parallelism.context_parallel_degree") or 1
    pairs = (
        ("num_attention_heads", tensor, "tensor ranks"),
        ("num_query_groups", tensor, "tensor ranks"),
        ("num_experts", _whole(evidence, "expert_model_parallel_size") or 1, "expert ranks"),
        ("seq_length", 2 * context if context > 1 else 1, "halves of the context ranks"),
        ("global_batch_size", _whole(evidence, "micro_batch_size") or 1, "sequences of a micro-batch"),
        ("hidden_size", _head_count(evidence), "attention heads"),
    )
    for name, divisor, noun in pairs:
        size = _whole(evidence, name)
        if size and divisor > 0 and size % divisor and not (name == "num_query_groups" and size < divisor):
            yield name, f"{name} {size:,} does not divide by {divisor} {noun}", f"a multiple of {divisor}"
    if evidence.practice.trainer == "nemo" and evidence.find_setting("tensor_model_parallel_size") is None:
        # The checkpoint or the recipe that the file starts from decides how it is split.
        return
    world, group = evidence.known_devices, tensor * stages * context
    if world and group > 0 and world % group:
        message = f"{world:,} devices do not divide by tensor {tensor} × pipeline {stages} × context {context}"
        yield "tensor_model_parallel_size", message, f"a multiple of {plural(group, 'device')}"
        return
    if any(setting.is_own_flag for setting in evidence.unmapped):
        return  # a fork may round a batch, or distribute it differently
    total, micro = _whole(evidence, "global_batch_size"), _whole(evidence, "micro_batch_size")
    ranks = world // group if world else 0
    if total and micro and ranks and total % (micro * ranks) and not evidence.find_setting("rampup_batch_size"):
        message = f"a global batch of {total:,} does not divide by micro-batch {micro} × {ranks:,} data ranks"
        yield "global_batch_size", message, f"a multiple of {micro * ranks:,}"


RULE = Rule(
    id="TOP005",
    slug="trainer-asserts",
    severity="error",
    requires="J",
    uses="P",
    requirement="Another trainer's file breaks none of the identities that this trainer asserts when it starts.",
    why="""
Trainers check their arguments after the devices are taken: Megatron's `validate_args` and DeepSpeed's
`_batch_assertion` end a job that waited hours in a queue. The same arithmetic takes a millisecond in a pull request.
""",
    how="""
Of every trainer: fp16 and bf16 are not both on. DeepSpeed: `train_batch_size = micro × accumulation × data ranks`
(of a JSON that names no split, for no number of data ranks that divides the devices: its program may split the model),
`offload_param` with stage 3 alone (a warning: below it has no effect). Scripts that name a DeepSpeed JSON: batch,
accumulation and format are the same in both; Hugging Face's Trainer refuses others, other programs take one of the two
(a warning). Megatron and NeMo: an interleaved schedule has
two stages or more; experts with
tensor ranks need sequence parallelism; no expert ranks without experts. Megatron-LM also: `--train-iters` or
`--train-samples`, `--save` with `--save-interval`, `--min-lr` not above `--lr`, as many positions as tokens of a
sequence, `--overlap-param-gather` with a distributed optimizer, a method for full recomputation. Where there is no
plan, also what must divide what: heads, experts, sequence, batch and devices.
""",
    limits={"most_broken": Limit(value=0, unit="identities", note="that may be broken: none, the trainer refuses")},
    bad='{"train_batch_size": 512, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}  # 128 GPUs',
    good='{"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}',
    fix="As the finding says; the trainer would say the same, later.",
    waive="A fork of the trainer that lifts the assertion: name the commit.",
    history="2026.1: added in 0.7.",
    references=(
        Reference(text="NVIDIA/Megatron-LM megatron/training/arguments.py: validate_args", mark="recalled"),
        Reference(text="deepspeedai/DeepSpeed runtime/config.py: _batch_assertion, _do_error_check", mark="recalled"),
        Reference(text="huggingface/transformers integrations/deepspeed.py: fill_match", mark="recalled"),
    ),
    check=check,
)
