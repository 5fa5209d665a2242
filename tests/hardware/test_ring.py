import threading
from pathlib import Path

import numpy as np
import pytest

from phalanx.hardware.probe_worker import Ring


@pytest.mark.parametrize(("ranks", "length"), [(2, 1), (2, 1000), (3, 10), (4, 300_001)])
def test_all_ranks_end_with_the_sum(tmp_path: Path, ranks: int, length: int) -> None:
    (tmp_path / "token").write_bytes(b"t" * 32)
    values = [np.arange(length, dtype=np.float32) * (rank + 1) for rank in range(ranks)]
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            ring = Ring(rank=rank, ranks=ranks, folder=tmp_path)
            ring.all_reduce(values[rank])
            ring.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    expected = np.arange(length, dtype=np.float64) * (ranks * (ranks + 1) / 2)
    for result in values:
        np.testing.assert_allclose(result, expected, rtol=1e-6)
