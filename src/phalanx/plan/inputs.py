"""Checks of the files that a job names, against the job and each other: data, tokenizer, weights, custom code.

`phalanx plan`, `check` and `train` (also with --dry-run) all use this module, so their answers agree. On a machine
without the files, such as the laptop where a large job is planned, the result is skipped and the missing files are
reported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from phalanx.errors import Problem, UserError
from phalanx.io.code_names import missing_code, missing_entry_point
from phalanx.io.path_probes import is_file, is_folder, path_exists
from phalanx.job.dataset import (
    LEAST_VOCAB,
    MANIFEST,
    TOKENIZER,
    DatasetManifest,
    Vocabulary,
    cache_folder,
    compare_vocabularies,
    corpus_folder,
    corpus_vocab,
    read_manifest,
    read_vocabulary,
)
from phalanx.job.draft import Origin
from phalanx.job.hf_config import read_config
from phalanx.job.model import ModelShape
from phalanx.job.parameter_counts import count_parameters
from phalanx.job.plugin_reference import (
    MODEL_GROUP,
    PLUGIN_GROUPS,
    SOURCE_MODULE,
    PluginReference,
    list_references,
    runs_named_code,
)
from phalanx.job.schema import Job
from phalanx.plan.prediction import token_budget
from phalanx.units import format_count, plural

# Rows of the embedding beyond the last token of the data that count as padding, not as a mistake: Qwen 2.5 has 271,
# DeepSeek-V3 465 of 129,280; Megatron-LM pads to 128 × tensor ranks.
MOST_PADDING_ROWS, MOST_PADDING_SHARE = 512, 0.1
# Muennighoff et al. 2023 (arXiv 2305.16264): up to 4 passes over the data are about as good as new data; the value of
# a pass decays with about 15 repetitions.
FREE_PASSES, SPENT_PASSES = 4.0, 16.0
# Keys of a config.json that decide tensor sizes: where one differs, no weight can be loaded.
SIZES = frozenset(
    (
        *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "gated", "experts"),
        *("expert_ffn", "shared_experts", "dense_layers", "qk_norm", "q_lora_rank", "kv_lora_rank"),
    )
)
USES = {
    "model.module": "the model is built by this function",
    "rules": "`phalanx check` asks this rule",
    "plugins.callbacks": "training calls it at every step",
    "plugins.loss": "training computes its loss with it",
    "plugins.optimizer": "training updates the weights with it",
    "plugins.data": "training reads its data from it",
    "plugins.metrics": "training reports it",
}
HOW_TO_BUILD = "phalanx data build OUT SOURCE… --tokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFindings:
    """The problems found in a job's files."""

    refused: tuple[Problem, ...] = ()  # training would be wrong, or fail after it started
    missing: tuple[Problem, ...] = ()  # absent from this machine: refuses training here, but not planning
    warnings: tuple[Problem, ...] = ()
    remarks: tuple[str, ...] = ()  # worth a line of output, but nothing to change

    @property
    def cautions(self) -> tuple[Problem, ...]:
        """Problems that a command which starts no training reports as warnings."""
        return (*self.missing, *self.warnings)


def look_at_inputs(
    job: Job,
    base: Path,
    *,
    origins: Mapping[str, Origin] | None = None,
    environ: Mapping[str, str] = os.environ,
    fresh: bool = True,
) -> InputFindings:
    """Check the files of a job that exist on this machine. `base` is the folder of the job file.

    A resumed run (not `fresh`) has its weights and its code, so only its data is checked.
    """
    checks = _Look(job, base, origins or {}, environ)
    if fresh:
        checks.at_code()
        checks.at_weights()
    checks.at_data()
    if fresh and job.train.weights:
        checks.at_tokenizers()
    return InputFindings(
        refused=tuple(checks.refused),
        missing=tuple(checks.missing),
        warnings=tuple(checks.warnings),
        remarks=tuple(checks.remarks),
    )


class _Look:
    """The checks of one job's files, and the problems found so far."""

    def __init__(self, job: Job, base: Path, origins: Mapping[str, Origin], environ: Mapping[str, str]) -> None:
        self.job, self.base, self._origins, self._environ = job, base, origins, environ
        self.refused: list[Problem] = []
        self.missing: list[Problem] = []
        self.warnings: list[Problem] = []
        self.remarks: list[str] = []
        self.folders: list[tuple[Path, DatasetManifest]] = []

    def place(self, key: str) -> str:
        """Return the file and line of a key that was written by hand, with the key; otherwise the key."""
        origin = self._origins.get(key)
        if origin is None or not origin.by_hand:
            return key
        # the origin of --set contains the key
        return f"{origin.where}: {key}" if origin.kind == "file" else origin.where

    def at_code(self) -> None:
        """Check that custom code exists: the model, plug-ins, rules. The code is not run."""
        job = self.job
        references = [("rules", name, missing_code(name, self.base)) for name in job.rules if name]
        if (module := job.model.module) and not module.startswith(f"{SOURCE_MODULE}:"):
            is_named = runs_named_code(module)
            problem = missing_code(module, self.base) if is_named else missing_entry_point(module, MODEL_GROUP)
            references.insert(0, ("model.module", module, problem))
        for kind, text in list_references(job.plugins):
            reference = PluginReference.parse(text, key=f"plugins.{kind}")
            if reference.place == SOURCE_MODULE:
                continue  # the job file contains the code
            if reference.place:
                problem = missing_code(f"{reference.place}:{reference.name}", self.base)
            else:
                problem = missing_entry_point(reference.name, PLUGIN_GROUPS[kind])
            references.append((f"plugins.{kind}", text, problem))
        for key, text, problem in references:
            if problem is not None:
                what, fix = problem
                # Training does not use rules.
                problems = self.warnings if key == "rules" else self.missing
                problems.append(Problem(where=self.place(key), what=f'"{text}": {what}', why=USES[key], fix=fix))

    def at_weights(self) -> None:
        """Check that the folder of weights exists and that its config.json describes the job's model."""
        if not self.job.train.weights:
            return
        folder = self.base / self.job.train.weights
        if not is_folder(folder):
            self.missing.append(
                Problem(
                    where=self.place("train.weights"),
                    what=f"there is no folder {folder}" if not path_exists(folder) else f"{folder} is a file",
                    why="training would start from the weights in it",
                    fix="name a folder with config.json and safetensors, relative to the job file",
                )
            )
            return
        if self.job.model.module or not is_file(folder / "config.json"):
            return
        try:
            config = read_config(folder / "config.json")
        # An unsupported model family; the tensors themselves are compared before the start.
        except UserError:
            return
        self._compare_shape(folder, config)

    def _compare_shape(self, folder: Path, stated: Mapping[str, object]) -> None:
        names = {field.name for field in fields(ModelShape)} - {"name"}
        differ = {
            name: value
            for name, value in stated.items()
            if name in names and isinstance(value, int | float | str | bool) and value != getattr(self.job.model, name)
        }
        differences = {
            name: f"{name} = {value} (the job: {getattr(self.job.model, name)})" for name, value in differ.items()
        }
        sizes, settings = (
            [name for name in differences if name in SIZES],
            [name for name in differences if name not in SIZES],
        )
        if sizes:
            self.refused.append(
                Problem(
                    where=self.place("train.weights"),
                    what=f"{folder} holds a different model: {', '.join(differences[name] for name in sizes)}",
                    why="the weights do not fit the job's model",
                    fix=f'take the shape from there: model.hf_config = "{folder / "config.json"}"',
                )
            )
        elif settings:
            self.warnings.append(
                Problem(
                    where=self.place("train.weights"),
                    what=f"were trained with other settings: {', '.join(differences[name] for name in settings)}",
                    why="the weights would load, but the model would compute something else",
                    fix=f'take the shape from there: model.hf_config = "{folder / "config.json"}"',
                )
            )

    def at_data(self) -> None:
        """Check the tokenizer and vocabulary of the datasets, and count the passes over them."""
        data = self.job.data
        if data.paths:
            self.folders = [
                dataset for path in data.paths if (dataset := self._dataset_manifest(self.base / path)) is not None
            ]
        elif data.corpus:
            folder = corpus_folder(data.corpus, cache_folder(self._environ), vocab=self.job.model.vocab)
            if is_file(folder / MANIFEST):
                self.folders = [dataset for dataset in (self._dataset_manifest(folder),) if dataset is not None]
            else:
                self._compare_size(corpus_vocab(self.job.model.vocab), f'the corpus "{data.corpus}"', folder)
        if not self.folders:
            return
        (first, first_manifest), *other_folders = self.folders
        for folder, manifest in other_folders:
            if manifest.tokenizer_sha256 != first_manifest.tokenizer_sha256:
                self.refused.append(
                    Problem(
                        where=str(folder),
                        what=f"was built with another tokenizer than {first}",
                        why="the same token id would stand for two different tokens",
                        fix=f"build it again with --tokenizer {first / TOKENIZER}",
                    )
                )
        self._compare_size(max(manifest.vocab for _, manifest in self.folders), str(first), first)
        if len(self.folders) == max(1, len(data.paths)):
            self._count_passes()
            self._held_out()

    def _dataset_manifest(self, folder: Path) -> tuple[Path, DatasetManifest] | None:
        key = self.place("data.path")
        if not is_folder(folder):
            fix = f"phalanx data build {folder} SOURCE… creates it (--corpus offline-english for sample text)"
            what = f"there is no folder {folder}"
            self.missing.append(Problem(where=key, what=what, why="training reads its tokens from there", fix=fix))
            return None
        try:
            return folder, read_manifest(folder)
        except UserError as error:
            self.missing.extend(error.problems)
            return None

    def _compare_size(self, vocab: int, name: str, folder: Path) -> None:
        """Check that the embedding has a row for every token of the data, and few rows that the data never uses."""
        model = self.job.model
        if vocab > model.vocab:
            self.refused.append(too_many_tokens(self.place("model.vocab"), name, vocab, model_vocab=model.vocab))
            return
        idle_rows = model.vocab - vocab
        if self.job.train.weights or idle_rows <= max(MOST_PADDING_ROWS, MOST_PADDING_SHARE * model.vocab):
            return
        unused = idle_rows * model.hidden * (1 if model.tied else 2)
        share = unused / count_parameters(model).total
        self.warnings.append(
            Problem(
                where=self.place("model.vocab"),
                what=f"the model has {model.vocab:,} tokens, and {name} uses {vocab:,} of them: {format_count(unused)} "
                f"parameters ({share:.0%} of the model) are never trained",
                why="they take memory, and the output layer computes them in every step",
                fix=f"set model.vocab = {-(-vocab // 64) * 64}, or build the data with the model's own tokenizer: "
                f"{HOW_TO_BUILD} FILE",
            )
        )

    def _count_passes(self) -> None:
        """Remark how often training passes over the data, and warn where a source is repeated too often.

        Samples are drawn from the sources by weight, and a source starts again at its end.
        """
        data = self.job.data
        tokens = token_budget(data.tokens, count_parameters(self.job.model).total)
        passes = passes_of([manifest for _, manifest in self.folders], tokens=tokens, sequence=data.sequence)
        if not passes:
            return
        source, max_passes = max(passes.items(), key=lambda item: item[1])
        available = sum(manifest.total("tokens", "train") for _, manifest in self.folders)
        self.remarks.append(
            f"data: {format_count(available)} tokens to read, {format_count(tokens)} to train on: "
            f"{_passes_text(max_passes)}{f' over {source}' if len(passes) > 1 else ''}"
        )
        if max_passes <= FREE_PASSES:
            return
        max_tokens = int(tokens * FREE_PASSES / max_passes)
        trend = "there is hardly anything left to learn" if max_passes > SPENT_PASSES else "each pass adds less"
        self.warnings.append(
            Problem(
                where=self.place("data.tokens"),
                what=f"{format_count(tokens)} tokens are {_passes_text(max_passes)} over "
                f"{f'the source {source!r} of ' if len(passes) > 1 else ''}{format_count(available)} tokens of data",
                why=f"beyond about {FREE_PASSES:g} passes {trend} (arXiv 2305.16264), and the model memorises the text",
                fix=f"build from more text, or train on data.tokens = {max_tokens:_} or fewer",
            )
        )

    def _held_out(self) -> None:
        """Warn where a job evaluates but the data has no held-out sequence."""
        train, length = self.job.train, self.job.data.sequence
        heldout_shards = [source.of("heldout") for _, manifest in self.folders for source in manifest.sources]
        if any(sum(shard.tokens for shard in shards) > length for shards in heldout_shards):
            return
        if train.evaluate_every and train.evaluate_sequences:
            self.warnings.append(
                Problem(
                    where=self.place("train.evaluate_every"),
                    what=f"has no effect: the data has no held-out sequence of {length:,} tokens",
                    why="evaluation needs text that training does not see",
                    fix="build the data with a larger --heldout, or with --split-on blank to split long texts "
                    "into paragraphs",
                )
            )

    def at_tokenizers(self) -> None:
        """Check that the weights were trained with the tokenizer of the data."""
        folder = self.base / self.job.train.weights
        if not is_folder(folder) or not self.folders:
            return
        data_folder, manifest = self.folders[0]
        try:
            weights_vocabulary, data_vocabulary = read_vocabulary(folder), read_vocabulary(data_folder)
        except UserError as error:
            self.refused.extend(error.problems)
            return
        where = self.place("train.weights")
        if weights_vocabulary is None or data_vocabulary is None:
            lacking = folder if weights_vocabulary is None else data_folder
            self.warnings.append(
                Problem(
                    where=where,
                    what=f"{lacking} has no {TOKENIZER}, so Phalanx cannot tell whether data and weights use the "
                    f"same tokenizer",
                    why="with another tokenizer every token id would mean something else to the weights, and no "
                    "error would occur",
                    fix=f"put the {TOKENIZER} of the weights beside them, and build the data with it: "
                    f"{HOW_TO_BUILD} {folder / TOKENIZER}",
                )
            )
            return
        if data_vocabulary.file.name == TOKENIZER and data_vocabulary.sha256 != manifest.tokenizer_sha256:
            self.refused.append(
                Problem(
                    where=str(data_vocabulary.file),
                    what=f"is not the tokenizer the data was built with: its digest is {data_vocabulary.sha256[:12]}…, "
                    f"and the manifest says {manifest.tokenizer_sha256[:12]}…",
                    why="the meaning of the token ids in the data is unknown",
                    fix="phalanx data checksum shows what else changed; build the data again",
                )
            )
            return
        self.refused.extend(self._vocabulary_conflicts(where, data_vocabulary, weights_vocabulary))
        self.warnings.extend(self._vocabulary_nuances(where, data_vocabulary, weights_vocabulary))

    def _vocabulary_conflicts(self, where: str, ours: Vocabulary, theirs: Vocabulary) -> Iterator[Problem]:
        result = compare_vocabularies(ours, theirs)
        if not result.conflicts:
            return
        token_id, word, weights_word = result.conflicts[0]
        meaning = f"{weights_word!r:.40}" if weights_word else "nothing"
        yield Problem(
            where=where,
            what=f"{theirs.file.parent} has another tokenizer than the data in {ours.file.parent}: "
            f"{len(result.conflicts):,} of {len(ours.numbers):,} tokens differ, e.g. id {token_id:,}: {word!r:.40} in "
            f"the data, {meaning} to the weights",
            why="the weights would read other tokens than were written, and no error would occur",
            fix=f"build the data with the weights' tokenizer: {HOW_TO_BUILD} {theirs.file}"
            if theirs.file.name == TOKENIZER
            else "build the data with the tokenizer of the weights, or leave train.weights out",
        )

    def _vocabulary_nuances(self, where: str, ours: Vocabulary, theirs: Vocabulary) -> Iterator[Problem]:
        result = compare_vocabularies(ours, theirs)
        if result.conflicts:
            return
        if result.added:
            yield Problem(
                where=where,
                what=f"the data has {plural(result.added, 'token')} that the tokenizer of the weights does not know",
                why="the weights have no trained row for them: they are trained from scratch",
                fix=f"if they were added on purpose, do nothing; otherwise {HOW_TO_BUILD} {theirs.file}",
            )
        if result.cut_otherwise:
            yield Problem(
                where=where,
                what=f"the tokenizer of the data in {ours.file.parent} has the same tokens as the weights' but splits "
                "text by other rules (normaliser, pre-tokeniser or merges)",
                why="the weights would see token sequences that were rare in their training",
                fix=f"{HOW_TO_BUILD} {theirs.file}",
            )


def too_many_tokens(where: str, name: str, vocab: int, *, model_vocab: int) -> Problem:
    """Return the problem of data whose largest token id is beyond the last row of the embedding."""
    return Problem(
        where=where,
        what=f"{name} has a vocabulary of {vocab:,}, larger than the model's {model_vocab:,}",
        why="token ids beyond the last row of the embedding cannot be looked up",
        fix=f"set model.vocab = {-(-vocab // 64) * 64} or more (matrix products are fastest with multiples of 64), "
        + (
            f"or build the data with --vocab {model_vocab}"
            if model_vocab >= LEAST_VOCAB
            else f"as no data has fewer than {LEAST_VOCAB} tokens: all bytes and the end of text"
        ),
    )


def passes_of(manifests: Sequence[DatasetManifest], *, tokens: int, sequence: int) -> dict[str, float]:
    """Return the passes over each source in `tokens` tokens of training, without sources shorter than a sequence."""
    sources = [source for manifest in manifests for source in manifest.sources]
    sizes = [max(0, (sum(shard.tokens for shard in source.of("train")) - 1) // sequence) for source in sources]
    # Of every Σ wᵢ·nᵢ samples, source i gives wᵢ·nᵢ (docs/data.md), so one round is wᵢ passes over it.
    round_samples = sum(source.weight * size for source, size in zip(sources, sizes, strict=True))
    if round_samples <= 0:
        return {}
    rounds = tokens / sequence / round_samples
    passes: dict[str, float] = {}
    for source, size in zip(sources, sizes, strict=True):
        if size:
            passes[source.name] = max(passes.get(source.name, 0.0), rounds * source.weight)
    return passes


def _passes_text(passes: float) -> str:
    """Return a number of passes in words.

    >>> _passes_text(0.00393), _passes_text(0.43), _passes_text(1.0), _passes_text(12.34)
    ('0.39% of a pass', '43% of a pass', '1 pass', '12.3 passes')
    """
    if passes < 0.995:
        return f"{100 * passes:.2g}% of a pass"
    return f"{passes:.3g} pass{'' if f'{passes:.3g}' == '1' else 'es'}"
