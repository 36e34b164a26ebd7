"""The worker of test_pinned_overlap.py: torch's CPU stands for a GPU here, and host memory for what it is."""

import torch

import millpond
from millpond import _leaves, _pinned, _session, _streams, _tree

_streams.torch_cuda = lambda: torch
_streams.current = lambda device: 0
_pinned.gpu = lambda ordinal: "cpu"
_session.ordinal_of = lambda device_id: -1

millpond.attach()
conn = millpond.connection(timeout=30)
seen = []
into = _pinned.into


def counted(*what):
    tier = into(*what)
    seen.append((tier, len(what[-1])))
    return tier


_pinned.into = counted
lazy, plain = False, _leaves.torch_tensor
_leaves.device_id = lambda device: 1
while True:
    value = conn.recv(lazy=lazy)
    if value is None:
        break
    if isinstance(value, str):
        lazy = value == "lazy"
        _leaves._on_gpu = lambda tensor, here=value == "both": here
        _tree._DISPATCH[torch.Tensor] = (lambda e, tensor, depth: _leaves.hosted(e, tensor)) if value == "both" else plain
        continue
    tensor = value["t"].value() if lazy else value["t"]
    conn.send({"t": tensor, "seen": list(seen)})
    seen.clear()
    del value, tensor
