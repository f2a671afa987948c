"""The engine ray as far as it needs no network; and the tests of `cluster/short.py`, which need one of their own."""

import subprocess
import sys
import threading

import pytest
import torch

import fedtailor as ft
from fedtailor._common.extras import install_command
from fedtailor.client.sites import Sites
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.transports import make_transport
from fedtailor.experiment import make_experiment
from fedtailor.messages import Train
from tests.engines.namespace import run_tests, why_not
from tests.engines.place import Pretended
from tests.helpers import assert_same

pytest.importorskip("ray", reason="ray is not installed")

from fedtailor.engines.ray_parcels import pack, pack_sites, unpack, unpack_sites


@pytest.mark.long
def test_on_a_cluster_of_two_nodes() -> None:
    if reason := why_not():
        pytest.skip(reason)
    outcome = run_tests("tests/engines/cluster/short.py")
    assert outcome.returncode == 0, outcome.stdout


def test_tensors_of_all_kinds_arrive_as_copies() -> None:
    tensors = {
        "vector": torch.randn(37),
        "matrix": torch.randn(5, 3, dtype=torch.float64).T,
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0),
        "flags": torch.tensor([True, False]),
        "half": torch.randn(5, dtype=torch.bfloat16),
        "complex": torch.randn(5, dtype=torch.complex64),
    }
    packed = pack(tensors)
    for _, content in packed:
        content.flags.writeable = False  # as Ray hands them out
    arrived = unpack(packed)
    assert_same(arrived, tensors)
    for tensor in arrived.values():
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        tensor.zero_()
    assert_same(unpack(packed), tensors)


def test_sites_arrive_with_each_piece_of_memory_once() -> None:
    """The network's parameters are views of one vector again. States do not go."""
    experiment = make_experiment({"method": "ditto", "data": "digits", "clients": 3, "model": "resnet", "epochs": 1})
    prepared = prepare(experiment, Objects())
    sites = Sites.at(prepared.data, prepared.terms, None)
    sites.store.put(1, {"secret": torch.full((1000,), 7.25)}, 1)
    request = Train(1, 1, {"theta": prepared.terms.initial})
    content, memories = pack_sites(sites.without_states())
    size = sum(map(len, memories))
    expected = prepared.data.x.nbytes + prepared.data.y.nbytes + 2 * prepared.terms.initial.nbytes
    assert expected <= size < expected + 50_000
    assert torch.full((1000,), 7.25).numpy().tobytes() not in b"".join([content, *map(bytes, memories)])
    there = unpack_sites((content, memories))
    for place in (sites, there):
        place.work(request, {})  # as after other work
    one, other = sites.work(request, {}), there.work(request, {})
    assert one[0].error == other[0].error == ""
    assert_same(one[0].upload, other[0].upload)
    assert_same(one[1], other[1])


def test_what_cannot_be_sent_is_said() -> None:
    from fedtailor.engines.ray_actors import _packed

    place = Pretended([1], during=threading.Lock().acquire)  # type: ignore[arg-type]
    with pytest.raises(
        ft.FedtailorError, match=r"cannot be sent to a cluster: TypeError: .*; use --engine processes\.$"
    ):
        _packed(place)


def test_the_settings_that_belong_to_it() -> None:
    place = Pretended([1])
    with pytest.raises(
        ft.FedtailorError, match=r"^The actors of a Ray cluster compute on the CPU: leave --device out\.$"
    ):
        make_transport("ray", place, 1, on_cpu=False)
    with pytest.raises(ft.FedtailorError, match=r"^There is no Ray cluster at 127\.0\.0\.1:7: "):
        ft.run("fedavg", data="digits", rounds=1, address="127.0.0.1:7")  # that is enough to say where
    assert ft.run("fedavg", data="digits", rounds=1, address="127.0.0.1:7", engine="in-process").finished


@pytest.mark.parametrize("engine", ["in-process", "processes"])
def test_ray_is_imported_for_its_engine_alone(engine: str) -> None:
    program = (
        "import sys, fedtailor as ft\n"
        f"ft.run('fedavg', data='digits', clients=3, rounds=1, model='mlp:4', engine='{engine}')\n"
        "assert 'ray' not in sys.modules\n"
        "sys.modules['ray'] = None\n"
        "try:\n"
        "    ft.run('fedavg', data='digits', clients=3, rounds=1, engine='ray')\n"
        "except ft.FedtailorError as error:\n"
        "    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == f"Ray is not installed: {install_command('ray')}.\n"
