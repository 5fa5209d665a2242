"""OPT001: learning rate, warm-up, weight decay, epsilon and betas are within the range of published runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from phalanx.job.parameter_counts import count_parameters
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, Severity, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule

DIVERGES = Impact(note="the loss may diverge or never fall, and then the whole run is lost")
LEARNS = Impact(note="no time lost, but what the model learns is at stake")
# GPT-3's table 2.1: 125M at 6e-4 ... 175B at 0.6e-4, a power of -0.32; batches of half a million tokens at the start.
RATE, RATE_PARAMETERS, RATE_POWER, RATE_BATCH = 6e-4, 125e6, 0.32, 500_000
STARTED = (
    "load",
    "finetune",
    "pretrained_checkpoint",
    "checkpoint.pretrained_checkpoint",
    "restore_from_path",
    "load_path",
    "trainer.load_path",
    "checkpoints.resume_checkpoint_path",  # nanotron
    "resume_from_checkpoint",  # Hugging Face's Trainer
    "checkpoint.initial_load_path",  # torchtitan
)


OPTIMIZER_KEYS = (
    "optimizer",
    "optim",
    "optimizer.name",
    "optimizer.type",
    "optimizer.params.type",
    "optimizer.optimizer_factory.name",
    "model.optim.name",
    "optimizer_type",
)


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check every setting of the optimizer that the file or a documented default states."""
    if not any(evidence.stated(f"optim.{name}") for name in ("lr", "weight_decay", "eps", "betas", "warmup_tokens")):
        return (exempt(f"the file leaves the optimizer to a script of {evidence.practice.trainer}"),)
    failures = (
        *_judge_rate(evidence, limits),
        *_judge_warmup(evidence, limits),
        *_judge_decay(evidence, limits),
        *_judge_epsilon(evidence, limits),
        *_judge_betas(evidence, limits),
    )
    rate = evidence.the_job.optim.lr
    return failures or (passed(f"learning rate {rate:g} and the rest are within what others train with", value=rate),)


def _optimizer_name(evidence: Evidence) -> str:
    """Return the name of the optimizer in another trainer's file, or else in the job."""
    for name in OPTIMIZER_KEYS:
        if (setting := evidence.find_setting(name)) is not None and isinstance(setting.value, str):
            return setting.value.lower()
    # A setting with a fork's name, such as --optimizer-selection.
    values = (
        setting.value
        for name, setting in evidence.settings.items()
        if re.search(r"optim\w*_(selection|type|name|kind)$", name)
    )
    return next((value.lower() for value in values if isinstance(value, str)), evidence.the_job.optim.name)


def usual_rate(parameters: float | None, batch_tokens: float | None) -> float:
    """Return the learning rate of published runs of this size.

    It grows with the square root of the batch, by a factor of at most two.

    >>> round(usual_rate(125e6, 500_000), 6), round(usual_rate(175e9, 3_200_000), 5)
    (0.0006, 0.00012)
    """
    rate = RATE * (RATE_PARAMETERS / max(parameters, 1e6)) ** RATE_POWER if parameters else 3 * RATE
    if batch_tokens:
        rate *= min(2.0, max(0.25, math.sqrt(batch_tokens / RATE_BATCH)))
    return rate


def _parameters(evidence: Evidence) -> float | None:
    """Return the parameters of the model; None where its size is only assumed."""
    # Layers of several kinds, which the planner cannot count.
    if any("hybrid" in name for name in evidence.settings):
        return None
    if evidence.plan is not None:
        return float(evidence.plan.prediction.parameters)
    origin = evidence.origins.get("model.hidden")
    if evidence.is_foreign and (origin is None or "stand-in" in origin.where):
        return None
    return float(count_parameters(evidence.the_job.model).total)


# Settings of models other than language models: classifiers and generators of images, and models of sound. A
# language model with image inputs keeps the rates of a language model, and has none of these settings.
OF_OTHER_MODELS = re.compile(
    r"(^|[._])(vision_pretraining_type|img_h|img_w|patch_dim|num_channels|num_classes|unet|unet_config|vae_config|"
    r"first_stage_config|dino_\w+|n_mels|sample_rate|spectrogram)([._]|$)"
)


def _is_language_model(evidence: Evidence) -> bool:
    """Return whether no setting indicates a model of something other than text; published rates are those of text."""
    if not evidence.is_foreign:
        return True
    names = (name for name, setting in evidence.settings.items() if setting.value not in (None, False, ""))
    return not any(OF_OTHER_MODELS.search(name) for name in names)


def _judge_rate(evidence: Evidence, limits: Limits) -> Iterator[Outcome]:
    optim = evidence.the_job.optim
    if not _is_language_model(evidence):
        return
    # Adapters and projectors have their own rates.
    if not evidence.stated("optim.lr") or evidence.partial:
        return
    name, usual = _optimizer_name(evidence), _usual_rate_here(evidence)
    if evidence.is_foreign and not any(family in name for family in ("adam", "muon")):
        # Published rates are those of Adam; Lion, SGD and others have their own.
        return
    max_rate = limits.number("most_rate") * (limits.number("muon") if "muon" in name else 1.0)
    ratio = optim.lr / usual
    if ratio <= max_rate:
        return
    source = "published runs of this size" if _parameters(evidence) else "any published run"
    yield failed(
        f"a learning rate of {optim.lr:g} is {ratio:,.0f} times that of {source}, {usual:.2g}",
        formula=(f"{optim.lr:g} / {usual:.2g} = {ratio:.3g} > {max_rate:g} (a threshold of ours)",),
        value=optim.lr,
        threshold=max_rate * usual,
        at="optim.lr",
        severity="error" if ratio > limits.number("error_factor") * max_rate else "warning",
        impact=DIVERGES,
        fix=f"about {usual:.1g}, unless a run of this model and parameterisation shows otherwise",
    )


def _usual_rate_here(evidence: Evidence) -> float:
    batch = evidence.the_job.batch.global_tokens if evidence.plan is not None else 0
    # A rate published for the size is fine with a small batch too.
    if batch and evidence.is_foreign:
        batch = max(batch, RATE_BATCH)
    return usual_rate(_parameters(evidence), float(batch) if batch else None)


def _judge_warmup(evidence: Evidence, limits: Limits) -> Iterator[Outcome]:
    job, key = evidence.the_job, "optim.warmup_tokens"
    tokens = evidence.plan.duration.tokens if evidence.plan is not None else job.data.tokens
    warmup = job.optim.warmup_tokens
    share = warmup / tokens if isinstance(tokens, int) and tokens > 0 else 0.0
    # A decay longer than the run belongs to the schedule of a longer run, of which this is the beginning.
    cut_short = any(
        (decay := evidence.setting_number(f"lr_decay_{unit}")) is not None
        and (length := evidence.setting_number(f"train_{unit}")) is not None
        and decay > length
        for unit in ("iters", "samples")
    )
    batch, steps = job.batch.global_tokens, evidence.setting_number("train_iters")
    if steps is None and isinstance(tokens, int) and batch:
        steps = tokens / batch
    if evidence.is_foreign and steps is not None and steps <= limits.number("least_steps"):
        # A few steps, to see whether they run: nothing is learnt either way.
        return
    if evidence.stated(key) and share > limits.number("most_warmup") and not cut_short:
        yield failed(
            f"the warm-up takes {share:.0%} of the training",
            value=share,
            threshold=limits.number("most_warmup"),
            at=key,
            severity="warning",
            impact=LEARNS,
            fix="a few per cent of the tokens, or 2,000 steps; the threshold is ours",
        )
    factory = evidence.find_setting("model._target_")
    if factory is not None and "ngpt" in str(factory.value).lower():
        return  # normalised weights need no warm-up (nGPT, arXiv:2410.01131)
    elsewhere = bool(evidence.open_why or evidence.find_setting(*STARTED))
    if warmup > 0 or job.train.weights or not evidence.stated("optim.lr") or elsewhere:
        return
    if evidence.is_foreign and job.optim.lr <= limits.number("low_rate") * _usual_rate_here(evidence):
        # A rate of fine-tuning, or of continued training from other weights.
        return
    if (evidence.setting_number("lr_warmup_fraction") or 0.0) > 0:
        return  # a fraction that is less than a step still counts as a warm-up
    absent = evidence.practice.trainer == "megatron" and not any("warmup" in name for name in evidence.settings)
    if not (evidence.stated(key) and (evidence.is_foreign or evidence.written(key))) and not absent:
        return
    yield failed(
        "training starts at the full learning rate, without a warm-up",
        value=0,
        at=key,
        severity="warning",
        impact=DIVERGES,
        fix="a warm-up of about 2,000 steps, or 1 % of the tokens: Adam's second moment is not known at the start",
    )


def _judge_decay(evidence: Evidence, limits: Limits) -> Iterator[Outcome]:
    decay, max_decay = evidence.the_job.optim.weight_decay, limits.number("most_decay")
    if not evidence.stated("optim.weight_decay") or decay <= max_decay:
        return
    yield failed(
        f"a weight decay of {decay:g}; published runs have 0.01 to 0.1",
        value=decay,
        threshold=max_decay,
        at="optim.weight_decay",
        severity="error" if decay > 2 * max_decay else "warning",
        impact=LEARNS,
        fix="0.1, as GPT-3 and Llama; the threshold is ours",
    )


def _judge_epsilon(evidence: Evidence, limits: Limits) -> Iterator[Outcome]:
    eps, max_eps = evidence.the_job.optim.eps, limits.number("most_eps")
    if not evidence.stated("optim.eps") or eps <= max_eps:
        return
    yield failed(
        f"Adam's epsilon is {eps:g}, larger than the gradients it is added to: steps shrink with them",
        value=eps,
        threshold=max_eps,
        at="optim.eps",
        severity="error" if eps > 100 * max_eps else "warning",
        impact=LEARNS,
        fix="1e-8, or 1e-5 as Llama 2; the threshold is ours",
    )


def _judge_betas(evidence: Evidence, limits: Limits) -> Iterator[Outcome]:
    first, second = evidence.the_job.optim.betas
    min_beta2, max_beta = limits.number("least_beta2"), limits.number("most_beta")
    if not evidence.stated("optim.betas"):
        return
    severity: Severity = "warning"
    if first >= 1 or second >= 1:
        message, severity = f"betas of {first:g} and {second:g}: a moment that never forgets never learns", "error"
    elif first > max_beta or second < min_beta2:
        message = f"betas of {first:g} and {second:g}; published runs have 0.9 and 0.95 to 0.999"
    else:
        return
    yield failed(
        message,
        value=second if second < min_beta2 else first,
        threshold=min_beta2 if second < min_beta2 else max_beta,
        at="optim.betas",
        severity=severity,
        impact=LEARNS,
        fix="0.9 and 0.95, as GPT-3 and Llama; the thresholds are ours",
    )


RULE = Rule(
    id="OPT001",
    slug="optimizer-sane",
    severity="error",
    requires="J",
    uses="P",
    requirement="Learning rate, warm-up, weight decay, epsilon and betas are within what anybody has trained with.",
    why="""
A slip of a digit is as easy in the optimizer as anywhere and costs the whole run: a learning rate of 10, a weight decay
of 10 or an epsilon of 0.5 start without a word and learn nothing. Published rates fall with the model, from 6e-4 at
125M parameters to 6e-5 at 175B (GPT-3, table 2.1), and differ by a factor of three, not of thirty.
""",
    how="""
`lr <= 10 × 6e-4 · (125M / parameters)^0.32 · sqrt(batch / 0.5M tokens)`, the last factor within 0.25 and 2, of other
trainers' files within 1 and 2 (Muon: 30
times that; 20 times beyond is an error); a warm-up, at most half of the tokens, where training starts from new
weights (of our own jobs only where `warmup_tokens` is written; other trainers' files with at most 100 steps are
tests, schedules that decay beyond the end of the run are those of a longer one, and a rate below a fifth of the usual
one is one of fine-tuning: their warm-up is not judged); other optimizers than Adam and Muon have rates of their own, as
adapters, projectors and models of images or sound have;
weight decay `<= 0.5`; epsilon `<= 1e-4`; `beta1 <= 0.99`, `beta2 >= 0.9`, both below 1. Only what a file or its
trainer's documented default states is judged. All thresholds are our choice, far outside of what is published.
""",
    limits={
        "most_rate": Limit(value=10.0, unit="x", note="of the usual learning rate of the size: our choice"),
        "error_factor": Limit(value=20.0, unit="x", note="beyond that bound it is an error: our choice"),
        "muon": Limit(value=30.0, unit="x", note="larger rates of Muon's normalised updates: our choice"),
        "most_warmup": Limit(value=0.5, note="of the tokens: our choice"),
        "least_steps": Limit(value=100, unit="steps", note="of another trainer's file that is no test: our choice"),
        "low_rate": Limit(value=0.2, unit="x", note="of the usual rate: no warm-up is missed there: our choice"),
        "most_decay": Limit(value=0.5, note="weight decay; twice as much is an error: our choice"),
        "most_eps": Limit(value=1e-4, note="Adam's epsilon; Llama 2 has 1e-5: our choice"),
        "least_beta2": Limit(value=0.9, note="of the second moment; GPT-3 and Llama have 0.95: our choice"),
        "most_beta": Limit(value=0.99, note="of the first moment; all have 0.9: our choice"),
    },
    bad="""
[optim]
lr = 3.0
weight_decay = 10.0
""",
    good="""
[optim]
lr = 3e-4
weight_decay = 0.1
warmup_tokens = 2_000_000_000
""",
    fix="The value of a published run of about the same size.",
    waive="Parameterisations with rates of their own, as muP: name the sweep that found them.",
    history="2026.1: added in 0.7.",
    references=(
        Reference(text="Brown et al., GPT-3, arXiv:2005.14165 table 2.1", mark="recalled"),
        Reference(text="Touvron et al., Llama 2, arXiv:2307.09288 section 2.2", mark="recalled"),
        Reference(text="all thresholds", mark="our choice"),
    ),
    check=check,
)
