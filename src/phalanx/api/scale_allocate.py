"""Size a large run by a fitted scaling law."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult
from phalanx.api.scale_fit import FittedLaw
from phalanx.api.scale_inputs import require_text, require_whole
from phalanx.errors import mistake
from phalanx.io.codec import json_values
from phalanx.io.files import write_text
from phalanx.io.path_probes import resolve_path
from phalanx.record.run import require_name

if TYPE_CHECKING:
    from phalanx.scale.allocate_budget import Allocation


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SizedRun(PublicResult):
    """The model and tokens to train for a budget; `write_job` writes the job file.

    >>> print(phalanx.scale.allocate("law.json", gpu_hours=2000, cluster="8xH100:4"))  # doctest: +SKIP
    """

    allocation: Allocation

    def __str__(self) -> str:
        from phalanx.scale.allocate_text import allocation_text

        return allocation_text(self.allocation)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the complete plan, of which layout, time and bill are included."""
        values = dict(json_values(self.allocation))
        plan = self.allocation.plan
        if plan is not None:
            keys = ("layout", "duration", "bill", "prediction")
            values["plan"] = {key: json_values(getattr(plan, key)) for key in keys}
        return values

    def write_job(self, path: str | Path) -> None:
        """Write the job file that starts the run.

        A cluster file's path is relative to the current folder; in the written job file it is relative to that file's
        folder.
        """
        from phalanx.scale.allocate_budget import cluster_section

        text, spec = self.allocation.job_toml, self.allocation.cluster_spec
        if (spec.endswith(".toml") or "/" in spec) and not Path(spec).is_absolute():
            path_from_job = os.path.relpath(resolve_path(spec), resolve_path(path).parent)
            text = text.replace(cluster_section(spec), cluster_section(path_from_job))
        write_text(Path(path), text, fix="name another --out")


def allocate(
    fit: str | Path | FittedLaw,
    *,
    budget: float | str | None = None,
    gpu_hours: float | str | None = None,
    cluster: str | None = None,
    inference_tokens: float | str | None = None,
    extrapolate: bool = False,
    vocab: int = 128_256,
    sequence: int = 4096,
    data: str = "data/tokens",
    name: str = "scaled",
) -> SizedRun:
    """Size a run by a law: model, tokens, loss with its interval, layout, time, money and energy.

    `fit` is the result of `fit` or a file it wrote. `budget` is in FLOPs, or `gpu_hours` on a `cluster` at the speed
    that the planner predicts. With `inference_tokens`, a smaller model that is trained longer to the same loss, if
    that saves compute over training and serving. Beyond 100 times the largest run of the fit, `extrapolate` is
    required.

    >>> sized = phalanx.scale.allocate("law.json", budget="1e21", cluster="8xH100:16")  # doctest: +SKIP
    >>> sized.write_job("scaled.toml")  # doctest: +SKIP
    """
    from phalanx.scale.allocate_budget import allocate_budget
    from phalanx.scale.law_file import read_fit

    require_name(name)
    for option, value, least in (("--vocab", vocab, 2), ("--sequence", sequence, 1)):
        require_whole(option, value)
        if not least <= value <= 10**8:
            raise mistake(option, f"{value} is not in {least} to 100,000,000")
    for option, text in (("--cluster", cluster), ("--data", data)):
        if text is not None:
            require_text(option, text)
    sized = allocate_budget(
        fit.fit if isinstance(fit, FittedLaw) else read_fit(Path(fit)),
        budget=None if budget is None else str(budget),
        gpu_hours=None if gpu_hours is None else str(gpu_hours),
        cluster=cluster,
        inference_tokens=None if inference_tokens is None else str(inference_tokens),
        extrapolate=extrapolate,
        vocab=vocab,
        sequence=sequence,
        data=data,
        name=name,
    )
    return SizedRun(allocation=sized)
