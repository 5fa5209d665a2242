"""A few lines of text from a checkpoint, on one process: for people to look at, not for speed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from phalanx.job.schema import Job
from phalanx.train.data.dataset import TokenDataset
from phalanx.train.data.tokenizer import load_tokenizer
from phalanx.train.models.decoder import Decoder
from phalanx.train.state.paths import Location
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.whole_tensors import read_state

MOST_PARAMETERS = 2 * 10**9  # 8 GB in fp32: a larger model is sampled elsewhere
TEMPERATURE, TOP = 0.8, 40  # Fan et al. 2018: only the likeliest forty


def sample_texts(checkpoints: Location | str, job: Job, dataset: TokenDataset) -> Iterator[str]:
    """Continue an empty document, `train.samples` times; nothing for a model too large for one process."""
    found = newest_checkpoint(checkpoints)
    if job.model.module:
        return  # a model of the user's own is theirs to sample
    with torch.device("meta"):
        model = Decoder(job.model)
    if found is None or sum(param.numel() for param in model.parameters()) > MOST_PARAMETERS:
        return
    model.load_state_dict(read_state(found.path), assign=True, strict=False)
    model.tie()
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    generator = torch.Generator().manual_seed(job.data.seed)
    for _ in range(job.train.samples):
        tokens = generate(model, [dataset.end_of_text], job.train.sample_tokens, job.data.sequence, generator)
        yield tokenizer.decode(tokens[1:]).strip()


@torch.no_grad()
def generate(model: Decoder, start: list[int], count: int, window: int, generator: torch.Generator) -> list[int]:
    """`start` and up to `count` tokens behind it, each drawn from the likeliest few; ends at the end of a text."""
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
