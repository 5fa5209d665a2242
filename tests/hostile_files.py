"""Run by tests/test_hostile_files.py in a process of its own: every reader of files, over files that mean harm.

Address space is limited to what is in use once everything is imported, plus ROOM_BYTES; each call to CPU_S of processor
time. Whatever a reader does but return or raise a PhalanxError is printed, a JSON object a line.
"""

from __future__ import annotations

import json
import platform
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# On arm64 torch's allocator reserves addresses by the gigabyte.
ROOM_BYTES = 768 * 2**20 if platform.machine() == "x86_64" else 6 * 2**30
CPU_S = 20.0
SIZE = 40_000  # bytes of most files: a dotted key of so many took 1.6 GB

SECTIONS = b'accelerator = "H100"\ndomains = 2\n'


def texts() -> Iterator[tuple[str, bytes]]:
    """Files that are text, or nearly: by what is wrong with them."""
    n = SIZE // 2
    yield "empty", b""
    yield "nul", b"a = 1\n\0" + b"x" * 100
    yield "not-utf8", b'{"a": "\xff\xfe"}\n' * 100
    yield "noise", bytes((i * 7919 + i // 251) % 256 for i in range(SIZE))
    yield "one-line", b"a" * SIZE
    yield "long-key", b"k" * SIZE + b" = 1\n"
    yield "dotted-key", b"a" + b".a" * n + b" = 1\n"
    yield "dotted-key-late", SECTIONS + b"a" + b".a" * n + b" = 1\n"
    yield "quoted-dotted-key", b"''" + b".''" * (SIZE // 3) + b" = 1\n"
    yield "dotted-header", b"[a" + b".a" * n + b"]\nb = 1\n"
    yield "inline-dotted", b"a = { b" + b".b" * n + b" = 1 }\n"
    yield "many-keys", b"".join(b"k%d = 1\n" % i for i in range(SIZE // 10))
    yield "many-sections", b"".join(b"[s%d]\nk = 1\n" % i for i in range(SIZE // 14))
    yield "repeated-keys", b"a = 1\n" * (SIZE // 6)
    yield "repeated-sections", b"[[accelerator]]\n" * (SIZE // 16)
    yield "digits", b"a = " + b"9" * SIZE
    yield "exponent", b"a = 1e999999999\nb = -1e-999999999\n"
    yield "toml-arrays", b"a = " + b"[" * n + b"]" * n
    yield "toml-tables", b"a = " + b"{ b = " * (SIZE // 6)
    yield "open-string", b'a = "' + b"\\\\" * n
    yield "open-long-string", b'a = """' + b'""a' * (SIZE // 3)
    yield "json-deep-arrays", b"[" * SIZE
    yield "json-deep-objects", b'{"a":' * (SIZE // 5) + b"1" + b"}" * (SIZE // 5)
    yield "json-many-keys", b"{" + b",".join(b'"k%d": 1' % i for i in range(SIZE // 12)) + b"}"
    yield "json-repeated", b"{" + b",".join([b'"a": 1'] * (SIZE // 8)) + b"}"
    yield "json-digits", b'{"version": ' + b"9" * SIZE + b"}"
    yield "json-nan", b'{"version": 1, "scalars": {"a": NaN, "b": Infinity, "c": -Infinity}}'
    yield "json-counts", json.dumps(dict.fromkeys(COUNTS, 10**30)).encode()
    yield "json-negative", json.dumps(dict.fromkeys(COUNTS, -(2**63))).encode()
    yield "json-list", b"[1, 2, 3]"
    yield "json-nested-scalars", b'{"scalars": {"a": ' + b"[" * 900 + b"]" * 900 + b'}, "version": 1}'
    yield "csv-columns", b",".join(b"c%d" % i for i in range(100_000)) + b"\n" + b"1," * 99_999 + b"1\n"
    yield "csv-known-columns", KNOWN_COLUMNS + b"," + b",".join(b"c%d" % i for i in range(100_000)) + b"\n1\n"
    yield "csv-rows", KNOWN_COLUMNS + b"\n" + b"1,1,1\n" * (SIZE // 6)
    yield "csv-commas", KNOWN_COLUMNS + b"\n" + b"," * SIZE + b"\n"
    yield "csv-open-quote", KNOWN_COLUMNS + b'\n"' + b"x\n" * n
    yield (
        "yaml-laughs",
        b"a0: &a0 [x]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 30)),
    )
    yield "yaml-deep", b"".join(b" " * i + b"a:\n" for i in range(400))
    yield "yaml-flow", b"a: " + b"[" * (SIZE // 12)
    yield "yaml-tags", b"a: !!python/object/apply:os.system ['true']\n"
    yield "flags", b"torchrun train.py " + b" ".join(b"--flag-%d 1" % i for i in range(SIZE // 14))
    yield "shell-open", b"ARGS=( " + b"--a \\\n" * (SIZE // 6)
    yield "lines", b"\n" * SIZE
    yield "jsonl-empty", b"{}\n" * (SIZE // 3)
    yield (
        "jsonl-steps",
        b"".join(
            b'{"v":1,"t":%d,"rank":0,"event":"step","step":%d,"loss":1e308,"duration_s":1e308}\n' % (i, 2**62 - i)
            for i in range(SIZE // 80)
        ),
    )
    yield (
        "jsonl-types",
        b"".join(
            b'{"v":[],"t":{},"rank":"x","event":%s,"step":%s}\n' % (kind, step)
            for kind in (
                b'"step"',
                b'"epoch"',
                b'"incident"',
                b'"checkpoint"',
                b'"run_start"',
                b'"timeline"',
                b"7",
                b"null",
            )
            for step in (b'"a"', b"[]", b"1e400", b"-1", b"9" * 50, b"null", b"true")
        ),
    )


COUNTS = (
    "version",
    "world",
    "layers",
    "hidden",
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
)
COUNTS += (
    "hidden_act",
    "step",
    "ranks",
    "join",
    "hosts",
    "slots",
    "shards",
    "model",
    "added_tokens",
    "state",
    "earlier",
)
OF_RUNS = ("json-deep-objects", "json-counts", "json-negative", "jsonl-empty", "jsonl-steps", "jsonl-types", "noise")
KNOWN_COLUMNS = b"name,peak_bf16_tflops,memory_gib,box,port_gbps,radix,src,dst,bytes,size,time_us,id,quantity,source"


def headers() -> Iterator[tuple[str, bytes]]:
    """safetensors whose first words lie."""
    for name, length in (("largest", 2**64 - 1), ("negative", 2**63), ("gigabytes", 10 * 2**30), ("short", 10**6)):
        yield f"safetensors-{name}", struct.pack("<Q", length) + b"{}" * 100
    for name, head in (
        ("deep", b"[" * SIZE),
        ("digits", b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
        ("large", b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,18446744073709551615]}}'),
        (
            "many",
            b"{" + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(3000)) + b"}",
        ),
    ):
        yield f"safetensors-{name}", struct.pack("<Q", len(head)) + head + b"\0" * 8


def readers(folder: Path) -> dict[str, Callable[[bytes], object]]:
    """Every reader, as a function of a file's bytes."""
    from phalanx.hardware.catalog import load_accelerators
    from phalanx.hardware.cluster import load_cluster
    from phalanx.hardware.probe import load_profile
    from phalanx.io.files import read_text
    from phalanx.job.dataset import read_manifest, read_vocabulary
    from phalanx.job.hf_config import read_config
    from phalanx.job.load import load, load_waivers
    from phalanx.network.collective_fit import read_points
    from phalanx.network.fabric.fabric_file import read_fabric_file
    from phalanx.network.fabric.switch_catalogue import read_catalogue
    from phalanx.plan.calibrate import read_calibration
    from phalanx.plan.plan import Plan
    from phalanx.record.drill_record import read_record
    from phalanx.record.secret import read_secret
    from phalanx.rules.foreign.config_files import read_tree
    from phalanx.rules.foreign.shell.training_command import read_script
    from phalanx.sim.htsim.connection_matrix import read_cm
    from phalanx.sim.htsim.topology import read_topo
    from phalanx.sim.traffic_matrix import read_matrix
    from phalanx.train.data.tokenizer import load_tokenizer
    from phalanx.train.models.hf_weights import check_hf
    from phalanx.train.state.checkpoint_index import DamagedCheckpoint, RankFiles, read_rank_index
    from phalanx.train.state.checkpoint_index import read_manifest as read_commit
    from phalanx.train.state.storage import open_folder
    from phalanx.validate.network_claims import is_network_table, read_claims
    from phalanx.validate.throughput_table import read_table

    def put(name: str, data: bytes) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def at(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        return lambda data: read(put(name, data))

    def inside(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        return lambda data: read(put(name, data).parent)

    def commit(data: bytes) -> object:
        put("commit/manifest.json", data)
        try:
            return read_commit(open_folder(folder / "commit"))
        except DamagedCheckpoint:
            return None

    def rank_index(data: bytes) -> object:
        import hashlib

        put("commit/rank-00000.json", data)
        files = RankFiles(data_bytes=8, index_bytes=len(data), index_sha256=hashlib.sha256(data).hexdigest(), tensors=1)
        try:
            return read_rank_index(open_folder(folder / "commit"), 0, files)
        except DamagedCheckpoint:
            return None

    def weights(data: bytes) -> object:
        from phalanx.job.model import known_presets

        put("weights/model.safetensors", data)
        return check_hf(folder / "weights", known_presets()["gpt2"].model())

    found = {
        "job": at("job.toml", load),
        "waivers": at("waivers.toml", load_waivers),
        "cluster": at("cluster.toml", lambda path: load_cluster(path, environ={})),
        "accelerators.toml": at("accelerators.toml", load_accelerators),
        "accelerators.csv": at("accelerators.csv", load_accelerators),
        "machine profile": at("profile.json", load_profile),
        "fabric": at("fabric.toml", read_fabric_file),
        "switches": at("switches.csv", read_catalogue),
        "traffic matrix": at("matrix.csv", lambda path: read_matrix(path, 64)),
        "measured collectives": at(
            "nccl.txt", lambda path: read_points(read_text(path), where=str(path), operation="all-reduce", ranks=8)
        ),
        "htsim topology": at("htsim.topo", read_topo),
        "htsim matrix": at("htsim.cm", read_cm),
        "published runs": at("runs.csv", read_table),
        "network claims": at("claims.csv", lambda path: (is_network_table(path), read_claims(path))),
        "calibration": at("calibration.json", read_calibration),
        "plan": at("plan.json", lambda path: Plan.from_json(read_text(path, noun="plan"), where=str(path))),
        "config.json": at("hf/config.json", read_config),
        "dataset manifest": inside("dataset/manifest.json", read_manifest),
        "vocabulary": inside("vocabulary/tokenizer.json", read_vocabulary),
        "tokenizer": at("tokenizer.json", load_tokenizer),
        "other trainer's .toml": at("other/train.toml", read_tree),
        "other trainer's .json": at("other/ds.json", read_tree),
        "other trainer's .yaml": at("other/train.yaml", read_tree),
        "other trainer's script": at("other/train.sh", lambda path: read_script(path, {})),
        "drill record": at("drill.json", read_record),
        "secret": at("secret", read_secret),
        "checkpoint manifest": commit,
        "rank index": rank_index,
        "weights": weights,
    }
    return found | run_readers(folder)


def run_readers(folder: Path) -> dict[str, Callable[[bytes], object]]:
    """The page, the check and the live view of a run of which one file is hostile."""
    sys.path.insert(0, str(Path(__file__).parent))
    from synthetic import write_run

    from phalanx.elastic.failure import read_error, steps_done
    from phalanx.record.report.live import Watcher
    from phalanx.rules.log.stream import read_log

    run = write_run(folder, name="run", ranks=2, steps=6, incidents=0)
    whole = {name: (run.path / name).read_bytes() for name in ("events-00000.jsonl", "supervisor.jsonl")}

    def of(name: str) -> Callable[[bytes], object]:
        path = run.path / name

        def read(data: bytes) -> object:
            before = path.read_bytes() if path.exists() else None
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            try:
                return str(run), Watcher(run).look(), read_log(run), read_error(run, 0), steps_done(run)
            finally:
                path.unlink() if before is None else path.write_bytes(before)

        return read

    names = ("plan.json", "launch.json", "status.json", *whole, "events-00000.index", "errors/rank-00000.json")
    return {f"run: {name}": of(name) for name in names}


class TooLong(BaseException):
    """A reader took more processor time than it may."""


def over(*_: object) -> None:
    raise TooLong


def main(folder: Path) -> None:
    """Read everything with everything."""
    from phalanx.errors import PhalanxError

    every = readers(folder)
    files = {**dict(texts()), **dict(headers())}
    binary = [name for name in files if name.startswith("safetensors")] + ["noise", "empty", "nul"]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES,) * 2)
    signal.signal(signal.SIGPROF, over)
    calls, slowest = 0, (0.0, "", "")
    for reader, read in every.items():
        for name in binary if reader == "weights" else [name for name in files if not name.startswith("safetensors")]:
            # A page and a check of a run cost a tenth of a second: they are given what looks like their own files.
            if reader.startswith("run: ") and name not in OF_RUNS:
                continue
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            began_s, said = time.process_time(), ""
            try:
                read(files[name])
            except PhalanxError as error:
                if len(str(error)) > 40_000:
                    said = f"a message of {len(str(error)):,} characters"
            except BaseException as error:
                said = f"{type(error).__name__}: {str(error)[:200]}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            calls += 1
            slowest = max(slowest, (time.process_time() - began_s, reader, name))
            if said:
                print(json.dumps({"reader": reader, "file": name, "said": said}), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"calls": calls, "slowest": slowest}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
