"""What an accelerator-hour costs to rent, from the shipped table of cloud prices."""

from __future__ import annotations

import csv
import functools
import io
import statistics

from phalanx.hardware.catalog import data_text


def usd_per_device_hour(price_item: str) -> tuple[float, float, float] | None:
    """Cheapest, middle and dearest provider for an item (`A|B` pools two items), on demand; None when unlisted.

    >>> usd_per_device_hour("tpu-v6e-8")
    (2.7, 2.7, 2.7)
    """
    offers = [offer for item in price_item.split("|") for offer in _offers().get(item, ())]
    if not offers:
        return None
    typical = [usual for _, usual in offers]
    return min(least for least, _ in offers), statistics.median(typical), max(typical)


@functools.cache
def _offers() -> dict[str, list[tuple[float, float]]]:
    """Per item, each provider's cheapest and median on-demand price; spot prices can be taken back, so not here."""
    offers: dict[str, list[tuple[float, float]]] = {}
    for row in csv.DictReader(io.StringIO(data_text("price_power.csv"))):
        if row["kind"] == "price_usd_per_accel_hour":
            pair = float(row["value_min_or_mean"]), float(row["value_median_or_pue"])
            offers.setdefault(row["item"], []).append(pair)
    return offers
