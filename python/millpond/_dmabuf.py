"""A dma-buf of a value in GPU memory: for RDMA (NIXL, UCX, ibverbs) and other drivers, which take a descriptor and an offset."""

import os

from . import _native, errors
from .arena import address_of


class DmaBuf:
    """A descriptor over the pages that hold a value. Close it, or use it in a `with`; it keeps the value.

    The pages are whole: who may use the descriptor reaches what lies beside the value in its first and last page."""

    __slots__ = ("fd", "offset", "nbytes", "page_bytes", "_value")

    def __init__(self, fd, offset, nbytes, page_bytes, value):
        #: The descriptor; -1 after `close`.
        self.fd = fd
        #: Where the value starts in it.
        self.offset = offset
        #: The value's bytes.
        self.nbytes = nbytes
        #: The descriptor's bytes.
        self.page_bytes = page_bytes
        self._value = value

    def __repr__(self):
        return f"<millpond.DmaBuf fd {self.fd}: {self.nbytes} bytes at {self.offset} of {self.page_bytes}>"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()

    def fileno(self):
        """The descriptor."""
        return self.fd

    def close(self):
        """Closes the descriptor; what was registered with it stays registered."""
        fd, self.fd = self.fd, -1
        self._value = None
        if fd >= 0:
            os.close(fd)


def dmabuf(value):
    """A dma-buf of a contiguous value in GPU memory, the arena's or other. `Unsupported` where the device or the kernel has
    none, and for host memory (which needs none: register it as it is)."""
    address, device = address_of(value)
    if device < 0:
        raise errors.Unsupported("a dma-buf is of GPU memory; this value is in host memory, which RDMA registers as it is")
    if not _contiguous(value):
        raise errors.InvalidArgument("a dma-buf is of one range of memory: make the value contiguous")
    nbytes = _nbytes(value)
    if not nbytes:
        raise errors.InvalidArgument("a value without bytes has no dma-buf")
    made = _native.control("dma_buf", device=device, address=address, bytes=nbytes)
    return DmaBuf(made["fd"], made["offset"], nbytes, made["bytes"], value)


def _contiguous(value):
    check = getattr(value, "is_contiguous", None)
    if check is not None:
        return check()
    interface = getattr(value, "__cuda_array_interface__", None)
    return interface is None or interface.get("strides") is None


def _nbytes(value):
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if hasattr(value, "numel"):
        return value.numel() * value.element_size()
    interface = value.__cuda_array_interface__
    total = int(interface["typestr"][2:])
    for n in interface["shape"]:
        total *= n
    return total
