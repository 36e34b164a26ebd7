"""Joins the arena, from this file's path: nothing need be installed in the worker. Python 3.9, standard library.

    import os, runpy
    millpond = runpy.run_path(os.environ["MILLPOND_BOOTSTRAP"])["start"]()

as early as possible, before `import torch`. The variables come from `millpond.integrations.environment(arena, name)`. Where
they are not set, `start()` gives None: the program is running without an arena.
"""

import os
import sys


def start(allocator="auto", name=None):
    """Attaches this process, proves the arena by the canary, and sees to torch: with `allocator="auto"` torch's CUDA allocator
    is replaced, now or as soon as torch is imported, unless comfy-aimdo pages this process's memory; "replace" insists;
    "none" leaves torch alone (GPU values are then copied into the arena). Gives the package `millpond`, or None."""
    if not os.environ.get("MILLPOND_SOCKET"):
        return None
    millpond = _package()
    from millpond import _session, canary

    if _session._info is None:
        millpond.attach(name=name or os.environ.get("MILLPOND_NAME") or "%s (%d)" % (os.path.basename(sys.argv[0] or "worker"), os.getpid()))
        probe = os.environ.get("MILLPOND_CANARY")
        if probe:
            try:
                canary.check_ticket(probe)
            except Exception:
                millpond.detach()
                raise
    if allocator != "none" and any(d["ordinal"] != -1 for d in _session.info().get("devices", ())):
        if "torch" in sys.modules:
            _install(millpond, allocator)
        else:
            sys.meta_path.insert(0, _AfterTorch(lambda: _install(millpond, allocator)))
    return millpond


def _package():
    """The package that this file belongs to, whatever is or is not installed here."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if "millpond" in sys.modules:
        found = sys.modules["millpond"]
        if os.path.dirname(os.path.abspath(found.__file__)) != here:
            raise ImportError("another millpond is imported already, from %s; expected %s" % (found.__file__, here))
        return found
    folder = os.path.join(here, "_worker_path")
    sys.path.insert(0, folder)
    try:
        import millpond
    finally:
        sys.path.remove(folder)
    return millpond


def _install(millpond, allocator):
    from millpond import errors
    from millpond.integrations import comfyui

    try:
        comfyui.refuse_beside_aimdo()
        import millpond.torch

        millpond.torch.install()
    except (errors.Refused, errors.Unsupported) as e:
        if allocator == "replace":
            raise
        comfyui.log.warning("torch keeps its own allocator, its GPU values will be copied into the arena: %s", e)


class _AfterTorch:
    """Calls back once, when `torch` has been imported."""

    def __init__(self, then):
        self._then = then

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute, then = spec.loader.exec_module, self._then

            def exec_module(module):
                execute(module)
                then()

            spec.loader.exec_module = exec_module
        return spec
