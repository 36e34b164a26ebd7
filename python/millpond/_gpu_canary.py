"""The canary of the GPU tier, which is proved at a connection's first GPU value, in each direction by itself (`Prover`).

A process that never sends one pays nothing and needs neither torch nor a context. Where that fails, GPU values of this connection
go through host memory. A peer that is busy does not hold the value up: it goes right behind its canary. The canary has a stream
of its own, so nobody's kernels stand before it.
"""

import contextlib
import threading
import time

from . import _ref, _streams, errors
from .canary import _PERIOD, LARGE, pattern
from .tiers import log


class _Every:
    """Every GPU."""

    def __contains__(self, device):
        return True


EVERY_GPU = _Every()


class Prover:
    """Proves the GPU tier of one connection, GPU by GPU, without waiting: the probes go ahead of the first value on a GPU, so the
    other side has looked at them before it hands that value out. Where they are wrong it drops what comes until it is told that
    the tier is off for that GPU, and this side, which has kept what it sent since, sends that again by host memory, in order.

    Messages, each with this side's number of the GPU: ["k", "gpu", n] probes; ["k", "gpu-ok", n], ["k", "gpu-blind", n] (no torch
    there: it only passes values on), ["k", "gpu-bad", n] why; ["k", "gpu-off", n]."""

    def __init__(self, channel):
        self._channel = channel
        #: What this side may send, by GPU: "asked", True, "blind", False.
        self._states = {}
        #: The GPUs that values do not go by.
        self.off = set()
        #: Why not.
        self.reason = None
        #: Of which GPUs the other side is still to hear that they are off here. What comes meanwhile is dropped.
        self.dropping = set()
        self._kept = []
        #: GPU that was asked about, with no answer yet -> how much of `_kept` was sent before.
        self.asked = {}

    @property
    def out(self):
        """What this side may send, over all GPUs: None (no GPU value yet), "asked", True, "blind", False."""
        states = list(self._states.values())
        return next((state for state in ("asked", True, "blind", False) if state in states), None)

    def admit(self, encoded, message):
        """Called with the sending lock held, before `encoded` is sent; false: it must be encoded again, without a GPU of it.
        `message`: what is needed to send it again."""
        for device in encoded.gpus:
            if device not in self._states:
                self._ask(device)
            if self._states[device] is False:
                return False
        if self.asked:
            self._kept.append(message)
        return True

    def _ask(self, device):
        backend = gpu_backend()
        if not isinstance(backend, _Backend) or device == _streams.UNKNOWN:
            self._states[device] = "blind"
            return
        try:
            with backend.aside(device):
                self._channel._transmit(["k", "gpu", device], backend.probes(device))
        except _ENDED:
            raise
        except Exception as e:  # whatever torch or the driver says
            self._off(device, f"its canary could not be sent: {type(e).__name__}: {e}")
            return
        self._states[device] = "asked"
        self.asked[device] = len(self._kept)
        if len(self.asked) == 1:
            threading.Thread(target=self._await_answer, name="millpond-canary", daemon=True).start()

    def _await_answer(self):
        """Reads the answer where nobody receives, and lets go of what is kept when the channel ends: till then each of it may have
        to be sent again, and what the other side has not received it holds in any case."""
        pause = 0.02
        while self.asked and self._channel._ended is None:
            time.sleep(pause)
            pause = min(1.0, pause * 1.2)
            try:
                self._channel._poll()
            except errors.Error:
                break
        with self._channel._sending:
            if self._channel._ended is not None:
                self.asked.clear()
                self._kept.clear()

    def receive(self, message):
        """A message of the GPU tier's canary, on the reading thread, with no lock held."""
        step, device = message.header[1], _number(message.header)
        if step == "gpu":
            self._look_at(message, device)
        elif step == "gpu-off":
            self.dropping.discard(device)
        elif step in ("gpu-ok", "gpu-blind"):
            with self._channel._sending:
                if self._states.get(device) == "asked":
                    self._states[device] = True if step == "gpu-ok" else "blind"
                    self._answered(device)
        elif step == "gpu-bad" and self._states.get(device) == "asked":
            self._send_again(device, message.decode())

    def _answered(self, device):
        """Lets go of what need not be sent again."""
        self.asked.pop(device, None)
        first = min(self.asked.values(), default=len(self._kept))
        del self._kept[:first]
        self.asked = {other: at - first for other, at in self.asked.items()}

    def _look_at(self, message, device):
        backend, memories = gpu_backend(), message.memories
        if backend is None:
            self._channel._quietly(["k", "gpu-blind", device])
            return
        here = _gpu_here(memories)
        why = fault_of(backend, message, here)
        if not why:
            self._channel._quietly(["k", "gpu-ok", device])
            return
        self.dropping.add(device)
        if here is None:  # it may be known by now
            here = _gpu_here(memories)
        if here is not None and here not in self._states:
            self._off(here, f"from {self._channel.peer.name}: {why}")
        self._channel._quietly(["k", "gpu-bad", device], why)

    def _send_again(self, device, why):
        channel = self._channel
        with channel._sending:
            self._off(device, f"to {channel.peer.name}: {why}")
            start = self.asked.pop(device, len(self._kept))
            again = self._kept[start:]
            del self._kept[start:]
            # What is sent again is kept again, for the GPUs that are still asked about.
            self.asked = {other: min(at, start) for other, at in self.asked.items()}
            channel._quietly(["k", "gpu-off", device])
            for header, value, readonly, root in again:
                try:
                    channel._transmit(header, value, None, readonly, root)
                except _ENDED:
                    return
                except errors.Error as e:
                    log.error("a value to %s is lost, it could not be sent again by host memory: %s", channel.peer.name, e)
            self._answered(device)

    def _off(self, device, why):
        self._states[device] = False
        self.off.add(device)
        self.reason = f"the GPU tier failed its canary and is off for this connection: {why}"
        name = self._channel.peer.name
        log.warning("GPU tier of the connection to %s is off for GPU %d, its values go through host memory: %s", name, device, why)


def fault_of(backend, message, device=None):
    """What is wrong with a message of probes, looked at on a GPU (None: the current one); empty where nothing is."""
    try:
        if not isinstance(backend, _Backend):
            raise errors.Unsupported(backend or "torch is not loaded in this process")
        with backend.aside(device):
            wrong = backend.check(message.decode())
        return "; ".join(f"{name}: {what}" for name, what in wrong.items())
    except Exception as e:  # what cannot even be looked at is wrong
        return f"{type(e).__name__}: {e}"


def _gpu_here(memories):
    """This process's number of the GPU that received memory lies on; None where it is not known, or not one that is seen here."""
    return next((memory.device for memory in memories if 0 <= memory.device != _streams.UNKNOWN), None)


def _number(header):
    """Which GPU a message of the canary is about: the sender's number, or that of the one who asked."""
    number = header[2] if len(header) > 2 else None
    if type(number) is not int or not 0 <= number <= _streams.UNKNOWN:
        raise errors.Protocol(f"a message of the canary without a GPU: {header!r}")
    return number


_ENDED = (errors.Closed, errors.PeerDied, errors.OwnerDied, errors.NotAttached, errors.Forked)


def gpu_backend():
    """How GPU probes are made and looked at here: by torch. None where torch is not loaded; a text, why not, where it is but
    has no GPU."""
    import sys

    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    installed = getattr(sys.modules.get("millpond.torch"), "installed", lambda: None)
    if cuda is None or not (getattr(cuda, "is_initialized", lambda: False)() or installed()):
        return None  # a process that only passes values on is to get no context by this
    if not getattr(cuda, "is_available", lambda: False)():
        return "torch has no GPU in this process"
    return _Torch(torch)


class _Backend:
    """Makes probes and checks them, on a stream of the canary's own: nobody's kernels stand before it."""

    @staticmethod
    def aside(device=None):
        return contextlib.nullcontext()


class _Torch(_Backend):
    """GPU probes by torch."""

    _SEED = 200

    _streams = {}

    def __init__(self, torch):
        self.torch = torch

    @contextlib.contextmanager
    def aside(self, device=None):
        if device is None:
            device = self.torch.cuda.current_device()
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self.torch.cuda.Stream(device)
        with self.torch.cuda.stream(stream):
            yield

    def _blocks(self, make):
        torch = self.torch
        sizes = {"small": 256, "bf16": 70, "offset": 4096, "large": LARGE}
        out = {}
        for number, (name, nbytes) in enumerate(sizes.items()):
            data = (pattern(self._SEED + number) * (nbytes // _PERIOD + 1))[:nbytes]
            out[name] = make(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return out

    def _views(self, blocks):
        torch = self.torch
        square = blocks["small"].view(torch.float32).view(8, 8)
        return {
            "8x8 float32": square,
            "a view": square[::2, 1:4].t(),
            "bfloat16": blocks["bf16"].view(torch.bfloat16).view(5, 7),
            "an offset": blocks["offset"][1000:1200].view(torch.int16),
            "over 2 MiB": blocks["large"],
            "no elements": square[:0],
        }

    def probes(self, device):
        def make(data):
            block = _ref.empty((data.numel(),), "uint8", device, "t")
            block.copy_(data)
            return block

        return self._views(self._blocks(make))

    def plain_probes(self):
        """The same in torch's own memory."""
        device = self.torch.cuda.current_device()
        return self._views(self._blocks(lambda data: data.to(f"cuda:{device}")))

    def check(self, values):
        torch = self.torch
        wrong = {}
        for name, expected in self._views(self._blocks(lambda data: data)).items():
            got = values.get(name)
            if not isinstance(got, torch.Tensor) or not got.is_cuda:
                wrong[name] = f"it is a {type(got).__name__}" if not isinstance(got, torch.Tensor) else f"it is on {got.device}"
            elif got.shape != expected.shape or got.dtype != expected.dtype:
                wrong[name] = f"it is {got.dtype} {tuple(got.shape)}"
            elif not torch.equal(_bits(torch, got.cpu()), _bits(torch, expected)):
                wrong[name] = "its bytes differ"
        return wrong


def _bits(torch, tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)
