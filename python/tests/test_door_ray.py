"""Real Ray, real actors, torch CPU tensors on the host driver."""

import os

import pytest

from conftest import PACKAGE, native

ray = pytest.importorskip("ray", reason="ray is not installed: make test-doors")
torch = pytest.importorskip("torch")

import millpond  # noqa: E402
from millpond import integrations  # noqa: E402

pytestmark = native


@pytest.fixture(scope="module")
def actors():
    from millpond.integrations.ray import register

    with millpond.Arena(limit="256MiB", driver="host", name="ray-driver") as arena:
        register()
        os.environ["RAY_AUTH_MODE"] = "disabled"
        env = dict(integrations.environment(arena), PYTHONPATH=os.environ.get("PYTHONPATH", PACKAGE), RAY_TQDM="0")
        ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": env}, log_to_driver=False, object_store_memory=100 << 20)

        @ray.remote(enable_tensor_transport=True)
        class Actor:
            def __init__(self):
                from millpond.integrations.ray import join

                join()

            @ray.method(tensor_transport="MILLPOND")
            def make(self, n):
                import millpond

                self.mine = millpond.empty((n,), "float32", "cpu", "t")
                self.mine.fill_(1)
                return self.mine

            @ray.method(tensor_transport="MILLPOND")
            def plain(self, n):
                import torch

                return [torch.arange(n), torch.ones(3, dtype=torch.bfloat16)]

            def fill(self, tensor, number):
                import millpond

                tensor.fill_(number)
                return millpond._native.control("locate", address=tensor.data_ptr())["kind"]

            def total(self, tensors):
                return [float(t.sum()) for t in tensors]

            def first(self):
                return float(self.mine[0])

            def leases(self):
                import gc

                import millpond

                self.mine = None
                gc.collect()
                return millpond.counters()["leases"]

        yield [Actor.remote(), Actor.remote(), Actor.remote()]
        ray.shutdown()


def test_actors_share_memory(actors):
    producer, consumer, other = actors
    ref = producer.make.remote(100000)
    assert ray.get(consumer.fill.remote(ref, 7.0), timeout=60) == "import"
    assert ray.get(producer.first.remote(), timeout=60) == 7.0, "the consumer wrote into the producer's memory"
    assert ray.get(other.fill.remote(ref, 8.0), timeout=60) == "import"
    assert ray.get(producer.first.remote(), timeout=60) == 8.0


def test_several_tensors_in_an_object(actors):
    producer, consumer, _ = actors
    assert ray.get(consumer.total.remote(producer.plain.remote(10)), timeout=60) == [45.0, 3.0]


def test_rays_garbage_collection_lets_the_memory_go(actors):
    import time

    producer, consumer, _ = actors
    ref = producer.make.remote(1000)
    ray.get(consumer.fill.remote(ref, 1.0), timeout=60)
    del ref
    end = time.monotonic() + 30
    while ray.get(producer.leases.remote(), timeout=60):
        assert time.monotonic() < end, "not let go in time"
        time.sleep(0.05)


def test_the_transport_by_itself(tmp_path):
    from millpond.integrations.ray import MillpondCommunicator, MillpondTransport

    transport = MillpondTransport()
    with pytest.raises(millpond.Unsupported, match="not on this node"):
        meta = type("M", (), {"socket": str(tmp_path / "none"), "ticket": ""})()
        transport.recv_multiple_tensors("x", meta, MillpondCommunicator())


def test_both_signatures_of_registration(monkeypatch):
    from millpond.integrations import ray as door

    seen = []
    monkeypatch.setattr(door, "register_tensor_transport", lambda name, devices, transport: seen.append((name, devices, transport)))
    door.register()
    monkeypatch.setattr(door, "register_tensor_transport", lambda name, devices, transport, data_type: seen.append((name, data_type)))
    door.register("OURS")
    assert seen == [("MILLPOND", ["cpu", "cuda"], door.MillpondTransport), ("OURS", torch.Tensor)]


def test_the_module_that_rays_classes_were_in_before(monkeypatch):
    import importlib.util
    import sys

    from millpond.integrations import ray as door

    now = "ray.experimental.rdt.tensor_transport_manager"
    monkeypatch.setitem(sys.modules, "ray.experimental.gpu_object_manager", importlib.import_module("ray.experimental.rdt"))
    monkeypatch.setitem(sys.modules, "ray.experimental.gpu_object_manager.tensor_transport_manager", importlib.import_module(now))
    monkeypatch.setitem(sys.modules, now, None)
    spec = importlib.util.spec_from_file_location("millpond.integrations.ray_before", door.__file__)
    before = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, before)
    spec.loader.exec_module(before)
    assert before.MillpondTransport is not door.MillpondTransport and before.TensorTransportManager is door.TensorTransportManager
