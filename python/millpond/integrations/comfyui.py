"""ComfyUI's own process. Its allocator is left alone: the arena is beside it, for what crosses.

In a pack's `prestartup_script.py`:

    from millpond.integrations import comfyui
    comfyui.prestartup(limit="4GiB")

and in its `__init__.py`, where `comfy.model_management` can be imported:

    comfyui.announce()

`prestartup` makes no driver call in this process, and the owner that it starts is a process of its own that counts devices by
UUID, so it may run before ComfyUI has settled `CUDA_VISIBLE_DEVICES` (the order of 0.3) or after (since 2026).
"""

import atexit
import logging
import os
import sys

from .. import errors
from ..arena import Arena, parse_bytes

log = logging.getLogger("millpond")
_arena = None
_limit = None
_base = None


def prestartup(limit="4GiB", driver="auto", announced=None, **options):
    """Starts the arena and puts what workers need into this process's environment: comfy-env and others that copy it need
    nothing more. A second call gives the same arena. `announced`: bytes for `announce`, default `limit`."""
    global _arena, _limit
    if _arena is not None and _arena._open:
        return _arena
    from . import environment

    options.setdefault("name", "ComfyUI")
    _arena = Arena(limit=limit, driver=driver, **options)
    _limit = parse_bytes(announced if announced is not None else limit)
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    os.environ.update(environment(_arena))
    if connections is None:
        # For workers; this process's own context is ComfyUI's affair.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    atexit.register(close)
    log.info("arena at %s for ComfyUI's workers (limit %s a device)", _arena.socket, limit)
    return _arena


def arena():
    """The arena of `prestartup`."""
    if _arena is None:
        raise errors.NotAttached("comfyui.prestartup() has not been called: call it in the pack's prestartup_script.py")
    return _arena


def announce(model_management=None):
    """Adds what the arena may still take to `EXTRA_RESERVED_VRAM`, so that ComfyUI does not load models into it. What it has
    taken already ComfyUI sees by itself, for it asks the device. Returns the bytes that stand there now. Call it again when
    much has changed; it never drops what others have added."""
    global _base
    mm = model_management or sys.modules.get("comfy.model_management")
    if mm is None:
        raise errors.Unsupported("comfy.model_management is not imported yet: call announce() from the pack's __init__.py")
    if not hasattr(mm, "EXTRA_RESERVED_VRAM"):
        raise errors.Unsupported("this ComfyUI has no EXTRA_RESERVED_VRAM: memory cannot be announced to it")
    growth = _growth(arena())
    before = _base or 0
    mm.EXTRA_RESERVED_VRAM = max(0, int(mm.EXTRA_RESERVED_VRAM) - before) + growth
    _base = growth
    return mm.EXTRA_RESERVED_VRAM


def _growth(arena):
    """Bytes that the arena may still take, of the GPU where that is most; 0 with the host driver."""
    most = 0
    for device in arena.ledger()["devices"]:
        if str(device.get("device", device.get("id", ""))).startswith("HOST-"):
            continue
        limit = _limit if isinstance(_limit, int) else int(device.get("limit", 0))
        most = max(most, limit - int(device.get("reserved", 0)))
    return most


def refuse_beside_aimdo():
    """`Refused` where comfy-aimdo pages this process's GPU memory: it hooks the driver's allocation calls under torch and
    counts what goes through them, and memory of the arena does not. Explicit arena values and copies into it work beside it."""
    control = sys.modules.get("comfy_aimdo.control")
    active = control is not None and getattr(control, "lib", None) is not None
    if active or os.environ.get("COMFY_ENV_WORKER_AIMDO", "").lower() in ("1", "true", "yes"):
        raise errors.Refused(
            "comfy-aimdo pages the GPU memory of this process, so torch's allocator is not replaced: start the worker with "
            "COMFY_ENV_WORKER_AIMDO=0, or keep torch's allocator (values are then copied into the arena)"
        )


def close():
    """Ends the arena."""
    global _arena, _base
    if _arena is not None:
        _arena.close()
        _arena = _base = None
