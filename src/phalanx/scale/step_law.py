"""Learning rate and batch of a run: Step Law within its range, else the rates of the sweep, always bounded.

Step Law (arXiv:2503.04715): lr = 1.78·N^-0.712·D^0.307, batch = 0.57·D^0.571 in tokens, N without embeddings; medians
of its 1,000 bootstrap fits (95 %: -0.774 to -0.655, 0.271 to 0.345, 0.534 to 0.606). Its readable runs have 119M to
1.07B such parameters and 1.0B to 100B tokens: the repository's table of dense models (step-law/steplaw,
data/dense_lr_bs_loss.csv) 215M to 1.07B on 4B to 100B, the published checkpoints (StepLaw on Hugging Face) also 119M
on 7.0B and 214M on 1.0B. Extrapolated to 60k parameters it gives a learning rate of 0.17.

Beyond those tokens the rate stays at its value at the end of the range. Compared with eight published runs, whose
rates are recalled (Llama 2 and 3, OLMo 2, Chinchilla, GPT-3: 7B to 405B parameters, 0.3T to 15T tokens), it is then
1.6 times off, as a geometric mean; the extrapolated law is 2.3 times off and mostly too high. Batches are
extrapolated: 1.6 times off; kept at the end of the range they would be 5 times too small.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.scale.fit_result import UsedRates
from phalanx.units import format_count

LR_FACTOR, LR_SIZE, LR_TOKENS = 1.78, -0.712, 0.307
BATCH_FACTOR, BATCH_TOKENS = 0.57, 0.571
# The range of the trained runs, and a tenth more at each end: sizes without embeddings, tokens.
STEP_LAW_SIZES = (1.08e8, 1.18e9)
STEP_LAW_TOKENS = (0.9e9, 1.1e11)
# Largest factor from a trained learning rate, where the exponents transfer it to other sizes and tokens.
FARTHEST_LR = 4.0
# Steps of a run. With fewer, small models have not begun to learn from context: on the offline corpus, runs of 50 to
# 135 steps end at 5.3 nats, the entropy of single tokens, whatever their size. No power law has such a plateau.
ENOUGH_STEPS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRates:
    """Peak learning rate and tokens per step of a run, and their origin."""

    lr: float
    batch_tokens: float
    source: str  # "step law", "step law, bounded" or "runs"
    sentence: str = ""  # the origin in words; empty within Step Law's range


def step_law(params: float, tokens: float) -> tuple[float, float]:
    """Return the peak learning rate and tokens per step by Step Law; `params` without embeddings.

    >>> lr, batch = step_law(1e9, 100e9)
    >>> round(lr * 1e3, 2), round(batch / 1e6, 2)
    (1.66, 1.09)
    """
    return LR_FACTOR * params**LR_SIZE * tokens**LR_TOKENS, BATCH_FACTOR * tokens**BATCH_TOKENS


def carry_rates(
    lr: float, batch_tokens: float, *, larger: float, more_tokens: float, is_carried: bool = False
) -> tuple[float, float]:
    """Scale a run's rate and batch to a model `larger` times as large, on `more_tokens` times the tokens.

    muP and CompleteP transfer the rate to other sizes by themselves (`is_carried`), but not to longer training.
    """
    ratio = (1.0 if is_carried else larger**LR_SIZE) * more_tokens**LR_TOKENS
    return lr * min(max(ratio, 1.0 / FARTHEST_LR), FARTHEST_LR), batch_tokens * more_tokens**BATCH_TOKENS


def rates_of_run(*, size: float, tokens: float, larger: float | None, used: UsedRates | None) -> RunRates:
    """Return the rates of a run of `size` parameters without embeddings.

    `larger` is its size over that of the run in `used`, whose rates are scaled where Step Law does not apply.
    """
    law_lr, law_batch = step_law(size, tokens)
    is_inside = STEP_LAW_SIZES[0] <= size <= STEP_LAW_SIZES[1] and STEP_LAW_TOKENS[0] <= tokens <= STEP_LAW_TOKENS[1]
    if used is not None and larger is not None and (used.parametrization or not is_inside):
        lr, batch = carry_rates(
            used.lr,
            used.batch_tokens,
            larger=larger,
            more_tokens=tokens / used.tokens,
            is_carried=bool(used.parametrization),
        )
        method_text = f"{used.parametrization} and the exponents of tokens" if used.parametrization else "the exponents"
        run = f"N {format_count(used.params)}, D {format_count(used.tokens)}, learning rate {used.lr:.2g}"
        return RunRates(
            lr=lr,
            batch_tokens=min(batch or law_batch, tokens / ENOUGH_STEPS),
            source="runs",
            sentence=f"learning rate and batch are those of the best run of the largest budget ({run}), carried over "
            f"by {method_text} of Step Law",
        )
    if is_inside:
        return RunRates(lr=law_lr, batch_tokens=law_batch, source="step law")
    bounded, _ = step_law(max(size, STEP_LAW_SIZES[0]), min(max(tokens, STEP_LAW_TOKENS[0]), STEP_LAW_TOKENS[1]))
    lr, batch = min(law_lr, bounded), min(law_batch, tokens / ENOUGH_STEPS)
    cuts = []
    if lr < law_lr:
        cuts.append(f"its learning rate of {law_lr:.2g} is cut to {lr:.2g}")
    if batch < law_batch:
        cuts.append(f"its batch of {format_count(law_batch)} tokens is cut to {format_count(batch)}")
    return RunRates(
        lr=lr,
        batch_tokens=batch,
        source="step law, bounded",
        sentence=f"{format_count(size)} parameters (without embeddings) on {format_count(tokens)} tokens are outside "
        "of what Step Law was fitted to, 119M to 1.07B parameters and 1B to 100B tokens: "
        f"{' and '.join(cuts) or 'it is extended'}; try others around these",
    )
