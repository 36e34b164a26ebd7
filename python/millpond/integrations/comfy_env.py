"""comfy-env (0.4.46): tensors and arrays cross to its workers as offsets.

In the pack's `prestartup_script.py`, before or after `comfy_env.setup_env()`:

    from millpond.integrations import comfy_env
    comfy_env.install(limit="4GiB")

That starts the arena (see `comfyui.prestartup`), registers "Tensor" and "ndarray" with comfy-env's serializer registry here,
and tells workers by `COMFY_ENV_SERIALIZER_FILES` to do the same. A pack with a `serialization.py` of its own overwrites that
variable for its workers; it says at its top

    import os, runpy
    if "MILLPOND_COMFY_ENV" in os.environ:
        runpy.run_path(os.environ["MILLPOND_COMFY_ENV"])
"""

import os

from . import comfyui

#: The file that a worker's comfy-env loads by its path.
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_comfy_env_serializers.py")
_VARIABLE = "COMFY_ENV_SERIALIZER_FILES"


def install(limit="4GiB", driver="auto", **options):
    """See above. Gives the arena."""
    arena = comfyui.prestartup(limit, driver, **options)
    os.environ.update(variables())
    register()
    return arena


def variables(before=None):
    """What a worker needs beside `millpond.integrations.environment`: for `SubprocessWorker(env=...)` and `[env_vars]`. The
    serializer files that stood there stay. torch's asynchronous backend is taken out: its allocator cannot be replaced."""
    before = os.environ if before is None else before
    files = [f for f in before.get(_VARIABLE, "").split(",") if f.strip() and f.strip() != FILE]
    return {_VARIABLE: ",".join([FILE, *files]), "MILLPOND_COMFY_ENV": FILE}


def register(registry=None):
    """Registers here; comfy-env's registry, or one with the same `register(type_name, serialize, deserialize, tag)`."""
    from . import _comfy_env_serializers as serializers

    serializers.register(registry)
