"""Evaluation on held-out documents, the same sequences every time, in bits per byte; and texts written by the model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from phalanx.errors import UserError
from phalanx.job.schema import Job
from phalanx.train.callbacks import Callback
from phalanx.train.data.batches import IGNORED
from phalanx.train.data.token_samples import TokenDataset
from phalanx.train.data.tokenizer import load_tokenizer
from phalanx.train.engine import Engine
from phalanx.train.micro_batches import TokenSum
from phalanx.train.models.decoder import Decoder
from phalanx.train.state.paths import Location
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.whole_tensors import read_state

if TYPE_CHECKING:
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Result of one evaluation."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    seconds: float
    # The user's metrics, per valid token.
    metrics: Mapping[str, float] = field(default_factory=dict)


class HeldoutScorer:
    """Scores a model on held-out sequences, which are spread evenly over the split and divided among the data ranks.

    With `seed` the sequences are drawn at random instead.
    """

    def __init__(self, folders: Sequence[Path], engine: Engine, *, sequences: int, seed: int | None = None) -> None:
        self._engine = engine
        self._dataset = _open_heldout(folders, vocab=engine.shape.vocab) if sequences else None
        if self._dataset is None:
            return
        length = engine.settings.sequence
        available = self._dataset.num_samples(length)
        if available == 0:  # the held-out text is shorter than one sequence
            self._dataset = None
            return
        # The same sequences under every layout; rows of ignored targets fill up the last micro-batches.
        chosen = np.linspace(0, available - 1, min(sequences, available)).astype(np.int64)
        if seed is not None:  # a set that differs from the evaluation's
            drawn = np.random.default_rng(seed).choice(available, size=min(sequences, available), replace=False)
            chosen = np.sort(drawn).astype(np.int64)
        unit = engine.dims.data * engine.settings.layout.micro_batch
        rows = torch.from_numpy(np.ascontiguousarray(self._dataset.samples(chosen, length)))
        tokens, targets = _filled_rows(rows[:, :-1], unit, 0), _filled_rows(rows[:, 1:], unit, IGNORED)
        place, ranks = engine.meshes.index("data"), engine.dims.data
        self._tokens, self._targets = tokens.chunk(ranks)[place], targets.chunk(ranks)[place]

    def score(self, metrics: Mapping[str, TokenSum]) -> Score | None:
        """Evaluate now; None if nothing is held out. Every rank must call this together."""
        if self._dataset is None:
            return None
        began_s = time.perf_counter()
        sums = self._engine.evaluate_sums(self._tokens, self._targets, list(metrics.values()))
        loss_sum, tokens, *metric_sums = sums
        loss = loss_sum / max(tokens, 1)
        return Score(
            loss=loss,
            bits_per_byte=loss / math.log(2) / self._dataset.bytes_per_token,
            tokens=int(tokens),
            seconds=time.perf_counter() - began_s,
            metrics={name: metric_sum / max(tokens, 1) for name, metric_sum in zip(metrics, metric_sums, strict=True)},
        )

    def sequence_losses(self) -> npt.NDArray[np.float64]:
        """Return the nats per token of each sequence; empty if nothing is held out. Only for a model on one rank."""
        batches: list[torch.Tensor] = []

        def keep_losses(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
            wide = logits_BSV.flatten(0, 1).to(torch.promote_types(logits_BSV.dtype, torch.float32))
            losses = F.cross_entropy(wide, targets_BS.flatten(), reduction="none", ignore_index=IGNORED)
            is_valid_BS = targets_BS != IGNORED
            rows = losses.view(targets_BS.shape).double().sum(1)[is_valid_BS.any(1)]
            batches.append(rows / is_valid_BS.sum(1)[is_valid_BS.any(1)])
            return rows.sum()

        if self._dataset is None:
            return np.empty(0)
        self._engine.evaluate_sums(self._tokens, self._targets, [keep_losses])
        losses: npt.NDArray[np.float64] = torch.cat(batches).cpu().numpy()
        return losses


def _filled_rows(rows: torch.Tensor, unit: int, value: int) -> torch.Tensor:
    """Append rows of `value` up to a multiple of `unit`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % unit), value=value)


def _open_heldout(folders: Sequence[Path], *, vocab: int) -> TokenDataset | None:
    """Open the held-out split; None if the dataset has none."""
    try:
        return TokenDataset.open(list(folders), "heldout", vocab=vocab)
    except UserError:
        # The dataset was built without held-out documents, which training does not need.
        return None


class Evaluator(Callback):
    """Scores the model every `train.evaluate_every` steps, and at the end."""

    def __init__(self, training: TrainingContext, *, metrics: Mapping[str, TokenSum]) -> None:
        self._every, self._metrics = training.job.train.evaluate_every, metrics
        folders = training.dataset.folders if training.dataset is not None else ()
        sequences = training.job.train.evaluate_sequences if folders else 0
        self._scorer = HeldoutScorer(folders, training.engine, sequences=sequences)
        # Drills of peers compare two runs sequence by sequence.
        self._keeps_losses = training.control.peers is not None and training.control.peers.is_drilled

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Score the model if it is due; the last step is scored at the end of the run."""
        if self._every and training.step % self._every == 0 and training.step < training.batch_plan.steps:
            self.evaluate(training)

    def evaluate(self, training: TrainingContext) -> None:
        """Score the model now, and record the score. Every rank must call this together."""
        training.pause()
        score = self._scorer.score(self._metrics)
        by_sequence = {}
        if self._keeps_losses and training.step >= training.batch_plan.steps:
            by_sequence["sequence_losses"] = [round(loss, 6) for loss in self._scorer.sequence_losses().tolist()]
        training.control.check()
        if score is None:
            return
        training.events.write(
            "evaluate",
            step=training.step,
            loss=score.loss,
            bits_per_byte=score.bits_per_byte,
            tokens=score.tokens,
            seconds=score.seconds,
            **({"metrics": dict(score.metrics)} if score.metrics else {}),
            **by_sequence,
        )
        training.callbacks.call("on_evaluate", training, score)


# ---- sample texts for people, on one process and not optimised for speed ---------------------------------------------

MOST_PARAMETERS = 2 * 10**9  # 8 GB in fp32; larger models are not sampled
TEMPERATURE, TOP = 0.8, 40  # Fan et al. 2018: sample from the forty likeliest tokens


class TextSamples(Callback):
    """Lets the finished model write `train.samples` texts, on rank 0."""

    def on_end(self, training: TrainingContext, state: str) -> None:
        """Write the samples, if the run is done."""
        if state == "done" and training.rank == 0 and training.job.train.samples and training.dataset is not None:
            for text in sample_texts(training.folder.checkpoints, training.job, training.dataset):
                training.events.write("sample", step=training.step, text=text)


def sample_texts(checkpoints: Location | str, job: Job, dataset: TokenDataset) -> Iterator[str]:
    """Continue an empty document `train.samples` times; yields nothing for a model too large for one process."""
    checkpoint = newest_checkpoint(checkpoints)
    if job.model.module:
        return  # only the built-in decoder can be sampled here, not the user's model
    with torch.device("meta"):
        model = Decoder(job.model)
    if checkpoint is None or sum(param.numel() for param in model.parameters()) > MOST_PARAMETERS:
        return
    model.load_state_dict(read_state(checkpoint.path), assign=True, strict=False)
    model.tie()
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    generator = torch.Generator().manual_seed(job.data.seed)
    for _ in range(job.train.samples):
        tokens = generate_tokens(model, [dataset.end_of_text], job.train.sample_tokens, job.data.sequence, generator)
        yield tokenizer.decode(tokens[1:]).strip()


@torch.no_grad()
def generate_tokens(model: Decoder, start: list[int], count: int, window: int, generator: torch.Generator) -> list[int]:
    """Return `start` and up to `count` more tokens, each drawn from the likeliest few; stops at the end of the text."""
    tokens = list(start)
    end = start[0]
    for _ in range(count):
        logits_V = model(torch.tensor([tokens[-window:]]))[0, -1].float() / TEMPERATURE
        values, places = logits_V.topk(min(TOP, logits_V.numel()))
        chosen = int(places[torch.multinomial(values.softmax(-1), 1, generator=generator)].item())
        if chosen == end:
            break
        tokens.append(chosen)
    return tokens
