"""torch's CUDA graph captures, by the two methods of `torch.cuda.CUDAGraph` that every way to capture goes through.

torch 2.3 to 2.12 tells its allocator that a capture has ended only where that went well, and lets go of the graph's pool only then: after
one that failed the allocator would wait for its end for ever. So whoever sees the failure says it.
"""

import functools
import threading

import torch

from . import _native

_originals = {}
_before = _failed = None
#: The stream that each thread has begun a capture on that is under way.
_streams = {}


def install(before=None, tell=False):
    """`before` is called before a capture begins, and may refuse it by an exception. `tell`: the native library is told of a capture
    that fails. Doing it again changes these only."""
    global _before, _failed
    _before = before or _before
    _failed = _native.library().torch_capture_failed if tell else _failed
    if _originals:
        return
    graph = torch.cuda.CUDAGraph
    for name, watch in (("capture_begin", _watch_begin), ("capture_end", _watch_end)):
        _originals[name] = getattr(graph, name)
        setattr(graph, name, watch(_originals[name]))


def uninstall():
    """Puts torch's own methods back."""
    global _before, _failed
    _before = _failed = None
    while _originals:
        setattr(torch.cuda.CUDAGraph, *_originals.popitem())


def is_capturing():
    """Whether this thread has begun a capture that has not ended."""
    return threading.get_ident() in _streams


def any_capturing():
    """Whether any thread has."""
    return bool(_streams)


def _fail():
    if _failed is not None:
        _failed()


def _watch_begin(begin):
    @functools.wraps(begin)
    def capture_begin(graph, *args, **kwargs):
        if _before is not None:
            _before()
        try:
            result = begin(graph, *args, **kwargs)
        except Exception:
            # What was refused in the middle of another capture says nothing of that one.
            if not is_capturing():
                _fail()
            raise
        _streams[threading.get_ident()] = torch.cuda.current_stream()
        return result

    return capture_begin


def _watch_end(end):
    @functools.wraps(end)
    def capture_end(graph, *args, **kwargs):
        # torch refuses to end a capture on another stream than it was begun on: it goes on then.
        thread = threading.get_ident()
        if is_capturing() and torch.cuda.current_stream() != _streams[thread]:
            return end(graph, *args, **kwargs)
        _streams.pop(thread, None)
        try:
            return end(graph, *args, **kwargs)
        except Exception:
            _fail()
            raise

    return capture_end
