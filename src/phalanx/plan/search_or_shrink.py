"""The layout of a run on the available devices: the best one, or an earlier one with fewer data ranks."""

from __future__ import annotations

from dataclasses import replace

from phalanx.errors import Problem, UserError
from phalanx.plan.layout import Layout
from phalanx.plan.prediction import predict_layout
from phalanx.plan.request import PlanRequest
from phalanx.plan.search import Candidate, SearchResult, search_layouts
from phalanx.plan.shrink_layout import BatchDeal, shrink_layout
from phalanx.units import plural


def search_or_shrink(request: PlanRequest, earlier: Layout | None, *, reproducible: bool) -> SearchResult:
    """Search the layouts; where none divides the batch, fall back to the earlier layout with fewer data ranks.

    A run that loses ranks continues with fewer data ranks and pads its batch (`shrink_layout`), and a run that is
    resumed with the layout `earlier` may do the same. Raises the search's UserError if that layout does not fit
    either.
    """
    try:
        return search_layouts(request)
    except UserError as error:
        shrunk = _shrink(request, earlier, reproducible=reproducible) if earlier is not None else None
        if shrunk is None:
            raise
        refusal = error.problems[0].what
    deal = BatchDeal.of(shrunk.layout, reproducible=reproducible)
    padded = deal.rows(request.global_sequences) * shrunk.layout.data - request.global_sequences
    idle = request.cluster.devices - shrunk.layout.devices
    what = f"{refusal}: the layout of the earlier plan continues with {plural(shrunk.layout.data, 'data rank')}"
    what += f", and its batch is padded with {plural(padded, 'row')} that do not count" if padded else ""
    what += f"; {plural(idle, 'device')} left idle" if idle else ""
    return SearchResult(
        best=shrunk,
        fastest=shrunk,
        others=(),
        pareto=(shrunk,),
        legal=1,
        fitting=1,
        warnings=(Problem(where=request.cluster.name, what=what, fix="set parallel.* for another layout"),),
    )


def _shrink(request: PlanRequest, earlier: Layout, *, reproducible: bool) -> Candidate | None:
    devices = request.cluster.devices
    # A resumed run may also grow.
    largest = replace(earlier, data=max(1, devices * earlier.data // earlier.devices))
    layout = shrink_layout(largest, ranks=devices, sequences=request.global_sequences, reproducible=reproducible)
    if layout is None:
        return None
    prediction, memory = predict_layout(request, layout)
    if memory.total_bytes > memory.usable_bytes:
        return None
    return Candidate(layout=layout, step_s=prediction.step_s, memory_bytes=memory.total_bytes, fits=True)
