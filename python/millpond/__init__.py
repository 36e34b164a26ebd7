"""millpond: one arena of GPU memory for many processes.

import millpond                                      # parent
arena = millpond.Arena(limit="80%")
worker = subprocess.Popen([...], env=arena.worker_env("denoiser"))
conn = arena.accept(timeout=30)
conn.send({"latent": t, "steps": 20}); out = conn.recv(timeout=60)

import millpond                                      # worker
millpond.attach()
millpond.torch.install()                             # torch's CUDA allocator is ours from here on
conn = millpond.connection(); job = conn.recv()
"""

from . import _native, _ref, _session, tiers
from ._call import Call
from ._calls import cancelled, check_cancelled
from ._dmabuf import DmaBuf, dmabuf
from ._events import Death, Event, off, on_refusal
from ._ledger import ledger, read_ledger, scope
from ._ref import Ref
from ._session import attach, connect, connection, detach
from ._tickets import cancel_ticket, redeem, ticket
from ._trace import trace
from ._types import register
from .arena import Arena, adopt, record_stream, wait_done
from .channel import Channel, Peer, Sent, wait_any
from .errors import (
    AlreadyAttached,
    Cancelled,
    CannotCross,
    Closed,
    DriverUnavailable,
    Error,
    Forked,
    InvalidArgument,
    NotAttached,
    OutOfMemory,
    OwnerDied,
    OwnerUnavailable,
    PeerDied,
    Protocol,
    Refused,
    RemoteError,
    Stale,
    Timeout,
    Unsupported,
)

__version__ = "0.1.0"


def empty(shape, dtype="float32", device=None, kind=None):
    """A value in this process's own arena memory, unset; for workers and parents alike: see `Arena.empty`."""
    return _ref.empty(shape, dtype, _session.device_ordinal(device), kind)


def status():
    """Where this process stands: attached or not, devices, whether the owner is alive."""
    return _native.control("status")


def counters():
    """Messages, socket bytes, copied bytes and tensors so far; `tiers`: values by tier, `tier_bytes`: their bytes, `falls`: why
    not by a better one, `fall_steps`: from which tier to which."""
    return dict(
        _native.control("counters"), tiers=tiers.totals(), tier_bytes=tiers.nbytes(), falls=tiers.falls(), fall_steps=tiers.steps()
    )


def context_events(allowed, device=None):
    """Whether millpond may record events over a GPU's whole context in this process (it may until told otherwise); `device` None:
    over any GPU's, those not in use yet too. Such an event ends a CUDA graph capture that is under way. `millpond.torch.install()`
    knows of torch's captures and waits for them; where torch keeps its own allocator and graphs are captured, say False: then what
    a stream let go of goes back to its producer when that stream's next tensor is sent or received."""
    chosen = {} if device is None else {"device": _session.device_ordinal(device)}
    _native.control("context_events", allowed=bool(allowed), **chosen)
    _session.note_context_events(bool(allowed), chosen.get("device"))


def __getattr__(name):
    if name in ("torch", "pool"):  # the first imports torch: only on demand
        import importlib

        return importlib.import_module(f"millpond.{name}")
    raise AttributeError(f"module 'millpond' has no attribute {name!r}")
