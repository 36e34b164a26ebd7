"""Doors for programs that have a process boundary of their own.

    bootstrap   a worker joins the arena from a file's path, before torch, with nothing installed
    comfyui     the parent: an arena beside ComfyUI's own allocator, memory announced
    comfy_env   comfy-env's workers: serializers on its registry
    pyisolate   pyisolate's children: serializers on its registry, an adapter
    ray         a tensor transport for actors of one node
    cupy, rmm, lmcache   allocators and descriptors for theirs

Nothing here imports what it is for until it is used.
"""


def environment(arena, name=None):
    """The variables that let a process that somebody else starts join this arena: for `env=` and the like. They carry the
    key: hand them to processes that you trust."""
    import os

    from .. import _native, canary

    ours = arena.worker_env(name or "")
    names = ("MILLPOND_SOCKET", "MILLPOND_KEY", "CUDA_DEVICE_MAX_CONNECTIONS")
    env = {key: ours[key] for key in names}
    env["MILLPOND_LIBRARY"] = os.path.abspath(_native.library_path())
    env["MILLPOND_BOOTSTRAP"] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")
    if name:
        env["MILLPOND_NAME"] = name
    probe = getattr(arena, "_probe", None)
    if probe is None:
        probe = arena._probe = canary.make_ticket().decode()
    env["MILLPOND_CANARY"] = probe
    return env
