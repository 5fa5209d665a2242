"""The machine of a row: the catalogue's device with the links the row states."""

import pytest

from phalanx.errors import UserError
from phalanx.validate.throughput_table import published_cluster

ROW = {"gpu": "H100-80GB-SXM", "gpus": "64"}


def test_domains_follow_the_device():
    cluster = published_cluster(ROW)
    assert (cluster.domain_devices, cluster.domains) == (8, 8)
    assert cluster.accelerator.name == "H100-80GB-SXM"


def test_a_stated_node_size_wins():
    assert published_cluster(ROW | {"nodes_gpu": "4"}).domains == 16


def test_a_partly_filled_domain_counts():
    assert published_cluster(ROW | {"gpus": "12"}).domains == 2
    assert published_cluster(ROW | {"gpus": "1"}).domains == 1


def test_a_stated_network_wins_and_is_in_bits():
    assert published_cluster(ROW | {"inter_link_gbps_per_gpu": "100"}).nic_bytes_per_s == 12.5e9


@pytest.mark.parametrize("text", ["", "0", "fast"])
def test_an_unstated_network_is_the_usual_one(text):
    assert (
        published_cluster(ROW | {"inter_link_gbps_per_gpu": text}).nic_bytes_per_s
        == published_cluster(ROW).nic_bytes_per_s
    )


def test_an_unknown_device_is_named():
    with pytest.raises(UserError) as caught:
        published_cluster(ROW | {"gpu": "H900"})
    assert "unknown accelerator 'H900'" in str(caught.value)
