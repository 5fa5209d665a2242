"""The layout: how a model is split over devices, with a short and a full name."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to run a job on tensor × context × pipeline × data devices.

    Expert groups are formed within data × context × tensor.
    """

    data: int
    shard: int  # data (times context) ranks that share one sharded copy; 1 without sharding
    tensor: int
    context: int
    pipeline: int
    virtual_pipeline: int
    expert: int
    zero: int
    sequence_parallel: bool
    micro_batch: int  # sequences per device and pass
    accumulation: int  # micro-batches per step on each data rank
    recompute: str
    precision: str
    schedule: str
    offload: str
    compression: str

    def __repr__(self) -> str:
        return f"<Layout {self.name}: {plural(self.devices, 'device')}>"

    @property
    def devices(self) -> int:
        """The number of devices the layout occupies."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def axes(self) -> int:
        """The number of parallel axes in use besides data; fewer axes leave less that can go wrong."""
        return sum(size > 1 for size in (self.tensor, self.context, self.pipeline, self.expert))

    @property
    def short(self) -> str:
        """The name for narrow tables, without unused axes and without "no-recompute"."""
        axes = {"TP": self.tensor, "CP": self.context, "PP": self.pipeline, "VPP": self.virtual_pipeline}
        sizes = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
        groups = [self._zero_text, *([f"EP{self.expert}"] if self.expert > 1 else [])]
        words = [word for word in self._other_words if word != "no-recompute"]
        return " ".join(["·".join([*sizes, f"DP{self.data}"]), *groups, *words])

    @property
    def _zero_text(self) -> str:
        grouped = self.zero > 0 and self.shard < self.data * self.context
        return f"ZeRO-{self.zero}" + (f"/{self.shard}" if grouped else "")

    @property
    def _other_words(self) -> list[str]:
        words = [f"mbs{self.micro_batch}", self.recompute if self.recompute != "none" else "no-recompute"]
        if self.pipeline > 1 and self.schedule in ("gpipe", "zero-bubble"):
            words.append(self.schedule)
        if self.offload != "none":
            words.append(f"offload-{self.offload}")
        if self.compression != "none":
            words.append(f"grads-{self.compression}")
        return words

    @property
    def name(self) -> str:
        """The full name; `ZeRO-3/8` shards each copy of the state over groups of 8 ranks.

        >>> Layout(data=128, shard=128, tensor=8, context=1, pipeline=16, virtual_pipeline=1, expert=1, zero=1,
        ...        sequence_parallel=True, micro_batch=1, accumulation=16, recompute="full", precision="bf16",
        ...        schedule="1f1b", offload="none", compression="none").name
        'TP8·CP1·PP16·DP128 (ZeRO-1, EP1) mbs1 full'
        """
        stages = f"PP{self.pipeline}" + (f"·VPP{self.virtual_pipeline}" if self.virtual_pipeline > 1 else "")
        head = f"TP{self.tensor}·CP{self.context}·{stages}·DP{self.data} ({self._zero_text}, EP{self.expert})"
        return " ".join([head, *self._other_words])
