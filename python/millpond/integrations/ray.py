"""Ray (2.60; the older signature of `register_tensor_transport` too): tensors between actors of one node as offsets.

    import millpond, ray
    from millpond.integrations import environment
    from millpond.integrations.ray import register

    arena = millpond.Arena(limit="4GiB")
    register()
    ray.init(runtime_env={"env_vars": environment(arena)})

    @ray.remote
    class Producer:
        @ray.method(tensor_transport="MILLPOND")
        def make(self): return torch.ones(1 << 20)

Actors of other nodes have no way to this arena: an object that goes there is put with Ray's own transport
(`tensor_transport="NIXL"`), from the same tensor.
"""

import inspect
import os
from dataclasses import dataclass

from ray.experimental import register_tensor_transport

try:
    from ray.experimental.rdt.tensor_transport_manager import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
except ImportError:  # before the module moved
    from ray.experimental.gpu_object_manager.tensor_transport_manager import (
        CommunicatorMetadata,
        TensorTransportManager,
        TensorTransportMetadata,
    )

from .. import _session, _tickets, errors
from . import bootstrap

NAME = "MILLPOND"


def register(name=NAME, devices=("cpu", "cuda"), data_type=None):
    """Registers the transport; before the actors are made, in the process that makes them. `data_type`: torch.Tensor."""
    if "data_type" in inspect.signature(register_tensor_transport).parameters:
        if data_type is None:
            import torch

            data_type = torch.Tensor
        register_tensor_transport(name, list(devices), MillpondTransport, data_type)
    else:
        register_tensor_transport(name, list(devices), MillpondTransport)


@dataclass
class MillpondMetadata(TensorTransportMetadata):
    """What goes to the receiver: a ticket."""

    ticket: str = ""
    socket: str = ""


@dataclass
class MillpondCommunicator(CommunicatorMetadata):
    """Nothing: both sides know the arena."""


class MillpondTransport(TensorTransportManager):
    """One-sided: the receiver maps what the producer made. Ray's garbage collection is RELEASE; a receiver's own hold is DONE."""

    def tensor_transport_backend(self):
        return NAME

    @staticmethod
    def is_one_sided():
        return True

    @staticmethod
    def can_abort_transport():
        return True  # nothing is in progress that could be left half done

    def actor_has_tensor_transport(self, actor):
        return True  # whether it has is known when it is used: a question here would block Ray

    def extract_tensor_transport_metadata(self, obj_id, rdt_object):
        tensors = list(rdt_object or ())
        kinds = {t.device.type for t in tensors}
        if len(kinds) > 1:
            raise errors.InvalidArgument(f"object {obj_id} has tensors on {sorted(kinds)}: Ray wants one type of device in an object")
        socket = join()
        ticket = _tickets.ticket([t.detach() for t in tensors], many=True).decode()
        meta = [(t.shape, t.dtype) for t in tensors]
        return MillpondMetadata(tensor_meta=meta, tensor_device=kinds.pop() if kinds else None, ticket=ticket, socket=socket)

    def get_communicator_metadata(self, src_actor, dst_actor, backend=None):
        return MillpondCommunicator()

    def recv_multiple_tensors(self, obj_id, tensor_transport_metadata, communicator_metadata, target_buffers=None):
        if not os.path.exists(tensor_transport_metadata.socket):
            raise errors.Unsupported(
                f"object {obj_id} is in the arena at {tensor_transport_metadata.socket}, which is not on this node: "
                'use tensor_transport="NIXL" between nodes'
            )
        join()
        tensors = _tickets.redeem(tensor_transport_metadata.ticket)
        if not target_buffers:
            return tensors
        for buffer, tensor in zip(target_buffers, tensors):
            buffer.copy_(tensor)
        return list(target_buffers)

    def send_multiple_tensors(self, tensors, tensor_transport_metadata, communicator_metadata):
        raise NotImplementedError("the receiver takes: nothing is sent")

    def garbage_collect(self, obj_id, tensor_transport_meta, tensors=None):
        if _session._info is not None:
            _tickets.cancel_ticket(tensor_transport_meta.ticket)

    def abort_transport(self, obj_id, communicator_metadata):
        return None


def join():
    """Joins the arena in an actor; for one that makes arena values of its own. The transport does it by itself."""
    if _session._info is None and bootstrap.start(name=f"ray {os.getpid()}") is None:
        raise errors.NotAttached(
            'this Ray process has no arena: ray.init(runtime_env={"env_vars": millpond.integrations.environment(arena)})'
        )
    return _session._info["socket"]
