"""Import and export of Hugging Face safetensors folders: one file, or several with an index.

Names and paths in the files are not trusted: only requested tensors are read, only from files in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.io.files import FileTooLargeError, read_bounded, write_text
from phalanx.io.path_probes import is_file, is_folder
from phalanx.io.write_errors import write_failure
from phalanx.job.hf_config import to_config
from phalanx.job.model import ModelShape
from phalanx.train.models.decoder import TIED, Decoder
from phalanx.train.models.hf_names import Match, match_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_INDEX_BYTES = 1 << 28  # DeepSeek-V3's index of 91,991 tensors has 9 MB
SHARD_BYTES = 5_000_000_000  # the shard size of transformers 4
FLOATS = ("F64", "F32", "F16", "BF16")
SHOWN = 6  # names listed per problem
# Buffers in old files that no model needs: causal masks of GPT-2, rotary tables of Llama.
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightEntry:
    """One tensor of the folder, as described in its file's header."""

    file: Path
    name: str  # in the file
    size: tuple[int, ...]
    dtype: str


def load_hf(folder: Path, model: Decoder) -> None:
    """Fill a decoder, or a stage of it, from a folder; raise UserError with every tensor that does not fit.

    The decoder's parameters must be plain tensors; ranks with split ones use `read_hf` and take their shard.
    """
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in read_hf(folder, model.shape, wanted=state):
            state[name].copy_(tensor)


def check_hf(folder: Path, shape: ModelShape) -> None:
    """Raise UserError with every tensor of a folder that does not fit the model; reads only the files' headers."""
    _check_entries(folder, shape, match_tensors(shape), _weight_entries(folder))


def read_hf(folder: Path, shape: ModelShape, *, wanted: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Phalanx name, full tensor) of every wanted parameter, one at a time, in the dtype of the file."""
    names = set(wanted)
    entries = _weight_entries(folder)
    matches = match_tensors(shape)
    _check_entries(folder, shape, matches, entries)
    with ExitStack() as stack:
        # Each file is opened once: parsing the header again for each of 36,000 experts of Qwen3-235B would take
        # minutes.
        files = {path: stack.enter_context(_open_weights(path)) for path in {entry.file for entry in entries.values()}}
        for match in matches:
            if names.isdisjoint({*match.ours, *(TIED if TIED[0] in match.ours and shape.tied else ())}):
                continue
            match_entries = [entries[name] for name in match.theirs]
            tensors = match.to_ours([files[entry.file].get_tensor(entry.name) for entry in match_entries])
            for name, tensor in zip(match.ours, tensors, strict=True):
                if name in names:
                    yield name, tensor
                # On a last stage the tied table is named as its head
                if name == TIED[0] and shape.tied and TIED[1] in names:
                    yield TIED[1], tensor


def read_named(
    folder: Path, sizes: Mapping[str, Sequence[int]], *, wanted: Collection[str], others: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the wanted tensors of a user's own network, whose files use the network's names.

    `sizes` are the shapes of all tensors of the network; `others` are further names of tied tensors, which a file may
    contain and which are ignored. Raises UserError with every tensor that does not fit.
    """
    entries = {name: entry for name, entry in _listed_entries(folder).items() if name not in others}
    wrong = [
        f"{name} {list(entries[name].size)} instead of {list(size)}"
        for name, size in sizes.items()
        if name in entries and entries[name].size != tuple(size)
    ]
    problems = [
        *_listed_problem(str(folder), "lacks", [name for name in sizes if name not in entries]),
        *_listed_problem(
            str(folder), "has tensors this network does not:", [name for name in entries if name not in sizes]
        ),
        *_listed_problem(str(folder), "has tensors of another size:", wrong),
    ]
    if problems:
        raise UserError(problems)
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open_weights(path)) for path in {entry.file for entry in entries.values()}}
        for name in sizes:
            if name in wanted:
                yield name, files[entries[name].file].get_tensor(name)


def save_named(
    state: Mapping[str, Tensor], folder: Path, *, tied: Mapping[str, str], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write safetensors under the names of a user's own network, a tied tensor once; return the files.

    `safetensors.torch.load_model` fills the network from them; the file's metadata names the tied tensors, as
    `safetensors.torch.save_model` writes it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write_shards({name: tensor.contiguous() for name, tensor in state.items()}, folder, shard_bytes, tied)
    except OSError as error:
        raise write_failure(folder, error, needed_bytes=_state_bytes(state)) from error
    except SafetensorError as error:
        raise SystemFailure(Problem(where=str(folder), what=f"cannot be written: {error}")) from error


def _state_bytes(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def save_hf(
    state: Mapping[str, Tensor],
    shape: ModelShape,
    folder: Path,
    *,
    positions: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write config.json and safetensors that `AutoModelForCausalLM.from_pretrained` reads; return the files.

    `state` is the full model under Phalanx's names. Raises UserError if it lacks or adds a tensor, or if no Hugging
    Face family computes this shape.
    """
    matches = match_tensors(shape)
    _check_state(state, matches)
    hf_tensors = dict(_turned_tensors(state, matches))
    dtype = str(next(iter(hf_tensors.values())).dtype).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = _write_shards(hf_tensors, folder, shard_bytes)
    except OSError as error:
        raise write_failure(folder, error, needed_bytes=_state_bytes(hf_tensors)) from error
    except SafetensorError as error:
        raise SystemFailure(Problem(where=str(folder), what=f"cannot be written: {error}")) from error
    config = folder / "config.json"
    write_text(config, json.dumps(to_config(shape, positions=positions, dtype=dtype), indent=2) + "\n")
    return [config, *files]


def _turned_tensors(state: Mapping[str, Tensor], known: Sequence[Match]) -> Iterator[tuple[str, Tensor]]:
    for match in known:
        tensors = match.to_theirs([state[name].detach().cpu() for name in match.ours])
        for name, tensor in zip(match.theirs, tensors, strict=True):
            # A copy: safetensors refuses tensors that share memory, as the slices of stacked experts do.
            yield name, tensor.clone(memory_format=torch.contiguous_format)


def _write_shards(
    theirs: Mapping[str, Tensor], folder: Path, shard_bytes: int, more: Mapping[str, str] | None = None
) -> list[Path]:
    shards = _pack_shards(theirs, shard_bytes)
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        temporary = folder / f".{name}.tmp"
        save_file({key: theirs[key] for key in shard}, temporary, metadata={"format": "pt", **(more or {})})
        temporary.replace(folder / name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in theirs.values())
        file_of = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
        names.append(INDEX)
    # Remove an older export with another number of files, which would be read in place of this one.
    for path in [*folder.glob("model-?????-of-?????.safetensors"), folder / SINGLE, folder / INDEX]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    return [folder / name for name in names]


def _pack_shards(theirs: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Assign names to shards in order; a new shard begins whenever the next tensor would not fit."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in theirs.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _check_state(state: Mapping[str, Tensor], known: Sequence[Match]) -> None:
    expected = {name for match in known for name in match.ours}
    problems = [
        *_listed_problem("the model", "lacks", sorted(expected - set(state))),
        *_listed_problem("the model", "has tensors its shape does not:", sorted(set(state) - expected)),
    ]
    if problems:
        raise UserError(problems)


def _listed_entries(folder: Path) -> dict[str, WeightEntry]:
    """Return every tensor of the folder by its name in the file."""
    entries: dict[str, WeightEntry] = {}
    for path in _weight_files(folder):
        with _open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor_slice = file.get_slice(name)
                entries[name] = WeightEntry(
                    file=path, name=name, size=tuple(tensor_slice.get_shape()), dtype=str(tensor_slice.get_dtype())
                )
    return entries


def _weight_entries(folder: Path) -> dict[str, WeightEntry]:
    """Return every tensor of the folder; GPT-2 names without the "transformer." prefix get it."""
    entries = _listed_entries(folder)
    if "wte.weight" in entries:
        entries = {
            name if name.startswith("lm_head") else f"transformer.{name}": entry for name, entry in entries.items()
        }
    return {name: entry for name, entry in entries.items() if not name.endswith(IGNORED)}


def _weight_files(folder: Path) -> list[Path]:
    if is_file(folder / INDEX):
        return _indexed_files(folder)
    if is_file(folder / SINGLE):
        return [folder / SINGLE]
    pickled = sorted(path.name for path in folder.glob("*.bin")) if is_folder(folder) else []
    reason = f"{pickled[0]} is a pickle, which can run code when it is read" if pickled else ""
    raise mistake(str(folder), f"has neither {SINGLE} nor {INDEX}", why=reason, fix="name a folder with safetensors")


def _indexed_files(folder: Path) -> list[Path]:
    """Return the files named in an index; raise UserError for a name with a path, which could point anywhere."""
    index = folder / INDEX
    try:
        weight_map = json.loads(read_bounded(index, MOST_INDEX_BYTES).decode())["weight_map"]
        names = sorted(set(weight_map.values()))
    except OSError as error:
        raise SystemFailure(Problem(where=str(index), what=f"cannot be read: {error.strerror or error}")) from error
    except FileTooLargeError as error:
        raise mistake(str(index), str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise mistake(str(index), "is not an index: it needs a weight_map of tensor names to file names") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise mistake(
                str(index), f"names {str(name)[:80]!r}", why="only files in the same folder are read", fix="repair it"
            )
    missing = [name for name in names if not is_file(folder / name)]
    if missing:
        raise UserError(_listed_problem(str(index), "names files that are not there:", missing))
    return [folder / name for name in names]


def _open_weights(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise mistake(
            str(path), f"is not a safetensors file: {error}", why="it is damaged or cut short", fix="fetch it again"
        ) from error


def _check_entries(folder: Path, shape: ModelShape, known: Sequence[Match], entries: Mapping[str, WeightEntry]) -> None:
    """Raise UserError with all tensors that are missing, superfluous, of another size or not floating point."""
    expected = _their_sizes(shape, known)
    present = {name: entry for name, entry in entries.items() if not (shape.tied and name == "lm_head.weight")}
    wrong = [
        f"{name} {list(present[name].size)} instead of {list(size)}"
        for name, size in expected.items()
        if name in present and present[name].size != size
    ]
    coded = [f"{name} ({entry.dtype})" for name, entry in present.items() if entry.dtype not in FLOATS]
    location = str(folder)
    problems = [
        *_listed_problem(location, "lacks", [name for name in expected if name not in present]),
        *_listed_problem(
            location, "has tensors this model does not:", [name for name in present if name not in expected]
        ),
        *_listed_problem(location, "has tensors of another size:", wrong),
        *_listed_problem(location, "has tensors that are not floating point:", coded),
    ]
    if problems:
        raise UserError(problems)


def _their_sizes(shape: ModelShape, known: Sequence[Match]) -> dict[str, tuple[int, ...]]:
    """Return the shapes a file must have, by converting Phalanx's shapes without any values."""
    with torch.device("meta"):
        model: nn.Module = Decoder(shape)
    state = model.state_dict()
    return {
        name: tuple(tensor.shape)
        for match in known
        for name, tensor in zip(
            match.theirs, match.to_theirs([state[name_in_state] for name_in_state in match.ours]), strict=True
        )
    }


def _listed_problem(where: str, what: str, names: Sequence[str]) -> list[Problem]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return [Problem(where=where, what=f"{what} {', '.join(names[:SHOWN])}{more}")]
