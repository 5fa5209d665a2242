"""Drills of the suite `outside` in which files change between a stop and the next start, or were made to do harm."""

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

FLIPS = 20  # bits of a folder of exported weights, each tried by a command of its own or by its library
MOST_BYTES = 3 << 29  # of address space for a command that reads a hostile file: 1.5 GiB, mostly numpy's threads
MOST_CPU_S = 15.0  # of processor time for it, on a machine that is busy with other things
EVENT_FILES = 5_000


def _expect_refusal(done: CommandResult, *names: str) -> OutsideFinding:
    """The command must have refused, in words that name these."""
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
    """One bit of a file, anywhere in it."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


# ---- the run folder --------------------------------------------------------------------------------------------------


def _plan_bit(stage: OutsideStage) -> OutsideFinding:
    """The learning rate 0.003 becomes 0.007 by one bit, or whatever a bit of the first digit after lr makes of it."""
    run = stage.copy("plan-bit")
    text = run.plan_json.read_bytes()
    place = text.index(b'"lr"') + len(b'"lr": 0.')
    while not chr(text[place]).isdigit() or text[place : place + 1] == b"0":
        place += 1
    changed = bytearray(text)
    changed[place] ^= 1 if changed[place] != ord("1") else 2  # stays a digit, and is no 0
    run.plan_json.write_bytes(changed)
    return _expect_refusal(stage.resume(run), "plan.json")


def _newest_checkpoint(run: Run) -> Path:
    return run.path / "checkpoints" / f"step-{max(run.saved_steps()):08d}"


def _falls_back(stage: OutsideStage, name: str, damage: Callable[[Path], None]) -> OutsideFinding:
    """The newest checkpoint is damaged: it is named, an older one is taken, and the losses are as without damage."""
    whole = stage.copy(f"{name}-whole")
    if (first := stage.resume(whole)).code:
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
    ours, theirs = stage.losses(run), stage.losses(whole)
    if len(theirs) != RESUMED_STEPS:
        return OutsideFinding(ok=False, judged=False, reason=f"an undisturbed run ended after {len(theirs)} steps")
    differ = [step for step in theirs if ours.get(step) != theirs[step]]
    if differ:
        return OutsideFinding(ok=False, reason=f"step {differ[0]}: loss {ours.get(differ[0])}, not {theirs[differ[0]]}")
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
    """The newest checkpoint of another run, of a later step than any of ours."""
    words = ("train", str(stage.job), *TWO_RANKS, "--no-probe", "--runs", "runs-foreign")
    first = stage.command(*words, "--steps", "4", "--name", "foreign")  # it has ended: resuming it takes more steps
    if first.code:
        return OutsideFinding(ok=False, judged=False, reason=f"an undisturbed run ended with exit code {first.code}")
    run = Run(path=max((stage.folder / "runs-foreign").glob("foreign-*")))
    theirs = _newest_checkpoint(stage.ended_run())
    shutil.copytree(theirs, run.path / "checkpoints" / theirs.name)
    done = stage.command("train", "--resume", str(run.path), "--steps", str(RESUMED_STEPS), "--no-probe")
    taken = [step for step in stage.losses(run) if step >= 4]
    if done.code == 0 and (not taken or min(taken) > 4):
        return OutsideFinding(ok=False, reason=f"{theirs.name} of another run was taken")
    if theirs.name not in done.err and theirs.name not in run.events(0).read_text(encoding="utf-8"):
        return OutsideFinding(ok=False, reason=f"exit code {done.code}, and {theirs.name} is not named")
    return OutsideFinding(ok=True, reason=f"{theirs.name} of another run was named and not taken", steps_lost=0)


# ---- data ------------------------------------------------------------------------------------------------------------


@contextmanager
def _changed_data(stage: OutsideStage) -> Iterator[Path]:
    """The data of the job; what is changed in it is put back afterwards."""
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
    """Make digests that fit the tokens, as somebody does who builds a dataset with a tokenizer of another size."""
    manifest = read_manifest(folder)
    sources = []
    for source in manifest.sources:
        shards = []
        for shard in source.shards:
            whole, blocks = digest_blocks(folder / shard.file, manifest.block_bytes)
            (folder / shard.block_file).write_bytes(blocks)
            digest = hashlib.sha256(blocks).hexdigest()
            shards.append(dataclasses.replace(shard, sha256=whole, blocks_sha256=digest))
        sources.append(dataclasses.replace(source, shards=tuple(shards)))
    text = dataclasses.replace(manifest, sources=tuple(sources)).dump()
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _token_beyond(tensor: int) -> Callable[[OutsideStage], OutsideFinding]:
    def play(stage: OutsideStage) -> OutsideFinding:
        with _changed_data(stage) as folder:
            for path in _token_files(folder):
                tokens = np.fromfile(path, dtype="<u2")
                tokens[::50] = 400  # the model has 320 rows
                path.write_bytes(tokens.tobytes())
            _seal_dataset(folder)
            words = ["--cluster", "local-cpu:2", "--set", f"parallel.tensor={tensor}", "--no-probe"]
            words += ["--set", f"parallel.shard={2 // tensor}", "--set", f"parallel.zero={3 if tensor == 1 else 0}"]
            done = stage.command("train", str(stage.job), "--steps", "4", *words, "--runs", "runs")
            return _expect_refusal(done, _token_files(folder)[0].name, "400", "vocabulary")

    return play


def _wrong_corpus(stage: OutsideStage) -> OutsideFinding:
    """A fetched package that is not the one we know."""
    cache = stage.folder / "cache"
    packages = cache / "phalanx" / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    part = CORPORA["offline-english"][0].package
    name = f"{part.name.replace('/', '-').lstrip('@')}-{part.version}.archive"
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
    made = stage.command("export", str(stage.ended_run().path), str(out))
    if made.code:
        return OutsideFinding(ok=False, judged=False, reason=f"the export failed: {made.last}")
    draw, unseen = random.Random(8), []
    files = sorted(path for path in out.iterdir() if path.is_file())
    for number in range(FLIPS):
        path = files[number % len(files)]
        whole = path.read_bytes()
        flip_bit(path, draw)
        try:
            found = bool(verify_checksums(out, fix="")[1])
        except PhalanxError:  # of SHA256SUMS itself, which can no longer be read
            found = True
        if not found:
            unseen.append(path.name)
        path.write_bytes(whole)
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
    flip_bit(newest / "manifest.json", random.Random(9))  # a bit of a moment would not matter to an export
    out = stage.folder / "exported-older"
    shutil.rmtree(out, ignore_errors=True)
    done = stage.command("export", str(run.path), str(out))
    if newest.name in done.err:
        return OutsideFinding(ok=True, reason=f"exit code {done.code}: {_first_with(done.err, newest.name)}")
    return OutsideFinding(ok=False, reason=f"exit code {done.code}, and {newest.name} is not named")


# ---- doors -----------------------------------------------------------------------------------------------------------


def _forged_consent(stage: OutsideStage) -> OutsideFinding:
    """A run folder that names code and consents to it in its own launch.json."""
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
    """Refused in a sentence, or answered, within the limits."""
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
    """Event files of ranks that the run never had."""
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
