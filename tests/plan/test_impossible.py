import re

import pytest

from phalanx.errors import UserError
from phalanx.plan.search import search_layouts


def message(request) -> str:
    with pytest.raises(UserError) as caught:
        search_layouts(request)
    return str(caught.value)


def test_sizes_that_do_not_divide_the_devices(make_ask):
    assert message(make_ask(cluster="8xH100:8", parallel__tensor=8, parallel__pipeline=3)) == (
        "--set parallel.tensor=8: tensor 8 × pipeline 3 = 24 does not divide the 64 devices of 8xH100-80GB-SXM:8\n"
        "  tensor × context × pipeline × data must use every device\n"
        "  make the product 16, or use a cluster of 72 devices"
    )


def test_all_four_sizes_must_give_the_device_count(make_ask):
    sizes = {f"parallel__{name}": 2 for name in ("tensor", "context", "pipeline", "data")}
    text = message(make_ask(cluster="8xH100:8", **sizes))
    assert "= 16 is not the 64 devices of" in text
    assert text.endswith("use parallel.data = 8, or a cluster of 16 devices")
    sizes["parallel__tensor"] = 16
    text = message(make_ask(cluster="6xH100:4", **sizes))
    assert text.endswith("use other sizes, or a cluster of 128 devices")


def test_shard_groups_count_among_the_sizes(make_ask):
    sets = {"parallel__tensor": 2, "parallel__pipeline": 2, "parallel__shard": 2, "parallel__zero": 2}
    text = message(make_ask(cluster="4xH100:1", parallel__virtual_pipeline=1, **sets))
    assert "tensor 2 × pipeline 2 × shard 2 = 8 does not divide the 4 devices of" in text
    assert "use parallel.shard = 1, smaller sizes, or a cluster of 8 devices" in text
    assert "virtual_pipeline" not in text


def test_a_setting_is_blamed_only_where_leaving_it_out_helps(make_ask):
    """Four sequences feed at most four data ranks: eight shards are too many, one chunk per stage is not to blame."""
    sets = {"parallel__context": 1, "parallel__shard": 8, "parallel__zero": 1, "parallel__virtual_pipeline": 1}
    text = message(make_ask(cluster="8xH100:1", batch=4, **sets))
    assert "parallel.shard = 8 leaves no valid layout on 8 devices" in text
    assert "leave parallel.shard out" in text


def test_a_batch_that_cannot_be_shared(make_ask):
    text = message(make_ask(cluster="1xH100:37", batch=512))
    assert "job.toml:8: the global batch of 512 sequences cannot be divided evenly over 37 devices" in text
    assert "use batch.global_sequences = 481 or 518, or another number of devices" in text


def test_a_batch_is_made_of_whole_micro_batches(make_ask):
    sizes = {f"parallel__{name}": 1 for name in ("tensor", "context", "pipeline")}
    text = message(make_ask(cluster="8xH100:2", batch=4, batch__micro=4, **sizes))
    assert "use batch.global_sequences = 64, or another number of devices" in text


def test_experts_that_do_not_fit_the_replicas(make_ask):
    text = message(
        make_ask("mixtral-8x7b", cluster="8xH100:2", parallel__expert=8, parallel__pipeline=4, parallel__tensor=1)
    )
    assert "--set parallel.expert=8: parallel.expert = 8 leaves no valid layout on 16 devices" in text
    assert "use 1 or 2 or 4, or leave parallel.expert out" in text


def test_a_fixed_choice_that_does_not_fit_names_the_one_to_drop(make_ask):
    text = message(
        make_ask("llama-3-70b", cluster="8xH100:1", parallel__zero=0, parallel__offload="none", parallel__tensor=8)
    )
    assert "llama-3-70b does not fit" in text
    assert "leave parallel.offload out: " in text


def test_precision_the_device_lacks(make_ask):
    with pytest.raises(UserError) as caught:
        make_ask(cluster="8xA100:2", precision__compute="fp8")
    assert str(caught.value) == (
        '--set precision.compute=fp8: precision.compute = "fp8", but A100-80GB-SXM has no fp8 matrix units\n'
        "  the catalogue knows no rate for it\n"
        "  use one of bf16, fp16, fp32, or another accelerator"
    )


def test_under_fixed_mode_the_cure_is_to_set_a_value_not_to_leave_it_out(make_ask):
    sets = {"parallel__mode": "fixed", "parallel__zero": 1, "parallel__tensor": 1}
    text = message(make_ask("llama-3-8b", cluster="8xH100:1", sequence=8192, **sets))
    cure = re.search(r"set (parallel\.\w+) = (\S+): .+ fits", text)
    assert cure is not None, text
    assert "leave" not in text
    key, value = cure.groups()
    assert search_layouts(
        make_ask("llama-3-8b", cluster="8xH100:1", sequence=8192, **(sets | {key.replace(".", "__"): value}))
    )


def test_device_counts_with_offload_are_named(make_ask):
    text = message(make_ask("llama-3-70b", cluster="1xH100:1", sequence=8192, batch=64))
    found = re.search(r"use (\d+) such devices with the optimizer in host memory", text)
    assert found is not None
    assert search_layouts(
        make_ask("llama-3-70b", cluster=f"1xH100:{found.group(1)}", sequence=8192, batch=64)
    ).best.fits


def test_logits_that_outgrow_their_index_are_named_with_the_largest_micro_batch(make_ask):
    text = message(
        make_ask(cluster="8xH100:1", sequence=8192, batch=512, batch__micro=4, parallel__tensor=1, parallel__context=1)
    )
    assert "a micro-batch of 4 × 8,192 tokens has 4,202,692,608 logits on a rank" in text
    assert "use batch.micro = 2 or less" in text
