"""Decoding: the text and ranges of a received message become the value again. The tags are those of `_tree`."""

import base64
import ctypes
import json
import sys

from . import _dtypes, _foreign, _memory, _native, _pinned, _ref, _session, _streams, _types, errors

_Memory, _IMPORT, _READY = _memory.Memory, _native.KIND_IMPORT, _native.READY


class Received:
    """A message as it came. It holds its imports: dropped without being decoded, it lets them go."""

    __slots__ = ("header", "body", "memories", "sender", "refused", "peer")

    def __init__(self, text, tensors, sender, peer=None):
        self.sender = sender
        self.peer = peer  # the sender's serial, where it came by a channel
        self.refused = None
        self.memories = tensors and [
            _Memory(handle, _IMPORT, address, nbytes, device, flags, stream, flags & _READY != 0)
            for address, nbytes, stream, handle, device, flags in tensors
        ]
        # Last: a message that is not ours lets its imports go.
        if text.startswith(_PLAIN) and text[-1] == "]":
            self.header, self.body = _PLAIN_HEADER, text[len(_PLAIN) : -1]
        else:
            self.header, self.body = _split(text)

    def refuse(self, reason):
        """Its values are not to be handed out: decoding it says why, and lets them go."""
        self.refused = reason

    def decode(self, lazy=False):
        """The value; with `lazy` every tensor in it is a `Ref`."""
        memories, self.memories = self.memories, ()
        if self.refused is not None:
            raise errors.Refused(f"a value was sent on a tier that does not work: {self.refused}")
        body = self.body
        try:
            if '"$"' not in body:
                value, end = _plain(body, 0)  # what we send has no blanks around it
                if end != len(body):
                    raise ValueError("not JSON")
                return value
            try:
                decoder = _spare.pop()
            except IndexError:
                decoder = _Decoder()
            return decoder.decode(memories, lazy, body, self.peer)
        except errors.Error:
            raise
        except RecursionError:
            raise errors.Protocol("received a value that is nested too deep") from None
        except StopIteration:
            raise errors.Protocol("received a malformed value: not JSON") from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, ctypes.ArgumentError) as e:
            raise errors.Protocol(f"received a malformed value: {type(e).__name__}: {e}") from e


_plain = json.JSONDecoder().scan_once


#: How a plain message begins: most do, and none has anything else in its header.
_PLAIN, _PLAIN_HEADER = '[["m"],', ("m",)
#: What follows the kind in each header; more may follow a "k".
_FORMS = {"m": (), "c": (int, str, (int, type(None))), "r": (int,), "e": (int,), "x": (int,), "l": (), "k": (str,)}


def _split(text):
    """`[header,body]`: the header parsed, the body as text."""
    try:
        header, end = _plain(text, 1)
        if text[0] != "[" or text[end] != "," or text[-1] != "]" or type(header) is not list:
            raise ValueError("not [header,body]")
        form = _FORMS[header[0]]
        if len(header) <= len(form) or (header[0] != "k" and len(header) > len(form) + 1) or not all(map(isinstance, header[1:], form)):
            raise ValueError(f"a header {header!r:.100}")
    except (ValueError, IndexError, KeyError, TypeError, StopIteration, RecursionError) as e:
        raise errors.Protocol(f"received a message that is not ours: {e}") from None
    return header, text[end + 1 : -1]


_BYTES = frozenset("bam")
#: Looked up once: each tensor asks for them.
_rows, _modules, _torch_contiguous = _dtypes.BY_NAME, sys.modules, _memory.torch_contiguous
#: Decoders that nobody uses at the moment: to make one costs as much as to decode a small message.
_spare = []


class _Decoder:
    __slots__ = ("memories", "lazy", "inline", "scan", "peer")

    def __init__(self):
        self.scan = json.JSONDecoder(object_hook=self.hook).scan_once

    def decode(self, memories, lazy, text, peer=None):
        self.memories = memories
        self.peer = peer
        self.lazy = lazy
        self.inline = 0  # values in the message itself
        try:
            value, end = self.scan(text, 0)
            if end != len(text):
                raise ValueError("not JSON")
            if self.inline:
                _native.count(b"received.inline", self.inline)
            return value
        finally:
            self.memories = ()  # a view that was refused must not live on in here
            if len(_spare) < 8:
                _spare.append(self)

    def hook(self, found):
        node = found.get("$")
        if node is None:
            return found
        return _TAGS[node[0]](self, node)

    def tensor(self, node):
        tag, kind, index, offset, name, shape, strides = node
        row = _rows.get(name) or _dtypes.lookup(name)
        shape = tuple(shape)
        if tag == kind == "t" and index >= 0 and not strides and not self.lazy and "torch" in _modules:
            return _torch_contiguous(self.memories[index], offset, row, shape)
        strides = tuple(strides) if strides else None
        if index < 0:
            return self.nothing(kind, row, shape, offset)
        memory = self.memories[index]
        _memory.check_bounds(memory, offset, row, shape, strides)
        if kind in _BYTES:
            if strides or len(shape) != 1 or row.itemsize != 1:  # else there may be fewer than `shape[0]`
                raise errors.Protocol(f"bytes of shape {shape}, strides {strides} and type {name}")
            return self.bytes(kind, memory, offset, shape[0])
        if not self.lazy:
            if kind == "n":
                if _ref.available("numpy") and (row.numpy or _ref.available("ml_dtypes")):
                    return _memory.numpy_view(memory, offset, row, shape, strides)
            elif kind == "t" and self.torch(memory.device):
                view = _memory.torch_whole if tag == "t" else _memory.torch_view
                return view(memory, offset, row, shape, strides)
        return _ref.Ref(memory, offset, row, shape, strides, kind)

    def torch(self, device):
        """Whether tensors are to be torch's: it is loaded, or it may be imported for host memory."""
        return "torch" in sys.modules or (device < 0 and not _streams.gpus() and _ref.available("torch"))

    def nothing(self, kind, row, shape, device_id):
        """A value without bytes; `device_id` is 0 for the CPU."""
        if 0 not in shape:
            raise errors.Protocol(f"a tensor of shape {shape} without memory")
        device = -1 if device_id == 0 else _session.ordinal_of(device_id)
        if not self.lazy and (
            (kind == "n" and _ref.available("numpy") and (row.numpy or _ref.available("ml_dtypes"))) or (kind == "t" and self.torch(device))
        ):
            return _ref.empty_value(kind, row, shape, device)
        return _ref.Ref(_memory.Memory(0, _native.KIND_BLOCK, 0, 0, device), 0, row, shape, None, kind)

    def put_back(self, value, device_id):
        """A GPU value that came by host memory: on a GPU again if this process uses one, else where it is."""
        torch = _streams.torch_cuda()
        if torch is None or self.lazy or not isinstance(value, torch.Tensor):
            if isinstance(value, _ref.Ref):
                value._gpu = device_id
            return value
        known = _ordinal(torch, device_id)
        nbytes = value.numel() * value.element_size()
        if nbytes >= _pinned.LEAST and value.is_contiguous():
            target = torch.empty_like(value, device=_pinned.gpu(known))
            if _pinned.copy(known, target.data_ptr(), value.data_ptr(), nbytes) is not None:
                return target
        return value.to(_pinned.gpu(known))

    def arrive(self, node, device_id, pieces):
        """The same for one that is still on its way to host memory: what is there of it is copied while the rest comes."""
        torch = _streams.torch_cuda()
        _, _, index, offset, name, shape, strides = node
        if torch is None or self.lazy or strides or index < 0:
            return self.put_back(self.tensor(node), device_id)
        row, shape = _dtypes.lookup(name), tuple(shape)
        memory = self.memories[index]
        _memory.check_bounds(memory, offset, row, shape, None)
        known = _ordinal(torch, device_id)
        target = torch.empty(shape, dtype=_dtypes.to_torch(row.name), device=_pinned.gpu(known))
        nbytes = _memory.span(shape, None) * row.itemsize
        if _pinned.into(known, target.data_ptr(), memory, offset, nbytes, pieces) is None:
            return self.put_back(self.tensor(node), device_id)
        return target

    @staticmethod
    def bytes(kind, memory, offset, nbytes):
        if kind == "b":
            return _memory.copy_out(memory, offset, nbytes)
        if kind == "a":
            return bytearray(_memory.buffer(memory, offset, nbytes))
        return _memory.buffer(memory, offset, nbytes)


def _ordinal(torch, device_id):
    """This process's number of the GPU that a value came from; its current one where that is not said."""
    return _session.ordinal_of(device_id) if device_id else torch.cuda.current_device()


def _inline(decoder, node):
    decoder.inline += 1
    return base64.b64decode(node[1], validate=True)


def _scalar(decoder, node):
    import numpy as np

    decoder.inline += 1
    return np.frombuffer(base64.b64decode(node[2], validate=True), _dtypes.to_numpy(node[1]))[0]


_TAGS = {
    "t": _Decoder.tensor,
    "v": _Decoder.tensor,
    "x": _foreign.decode,
    "g": lambda d, node: d.put_back(node[1], node[2]),
    "h": lambda d, node: d.arrive(node[1], node[2], node[3]),
    "u": lambda d, node: tuple(node[1]),
    "d": lambda d, node: {key: value for key, value in node[1]},
    "f": lambda d, node: float(node[1]),
    "i": lambda d, node: int(node[1], 16),
    "c": lambda d, node: complex(node[1], node[2]),
    "s": _scalar,
    "b": _inline,
    "a": lambda d, node: bytearray(_inline(d, node)),
    "m": lambda d, node: memoryview(_inline(d, node)),
    "p": lambda d, node: _types.unpickle(node[1], node[2], d.tensor(node[3])),
    "o": lambda d, node: _types.restore(node[1], node[2], node[3]),
}
