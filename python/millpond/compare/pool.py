"""A CUDA memory pool that other processes import, through the driver alone (ctypes): what hand-off by pool pointers costs."""

import ctypes

POINTER_BYTES = 64
_FD, _DEVICE, _PINNED_MEMORY, _READ_WRITE, _RELEASE_THRESHOLD = 1, 1, 1, 3, 4
_void, _u64, _int, _uint = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint


class _Location(ctypes.Structure):
    _fields_ = [("type", _int), ("id", _int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("allocation", _int),
        ("handle", _int),
        ("location", _Location),
        ("security", _void),
        ("most", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", _int)]


class Pool:
    """One pool on the first GPU, made here or imported. Everything happens on the default stream and is waited for."""

    def __init__(self):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._handle = _void()
        self._call("cuInit", _uint(0))
        device, context = _int(), _void()
        self._call("cuDeviceGet", ctypes.byref(device), _int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name, *arguments):
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else code}")

    @classmethod
    def create(cls):
        """A pool that may be exported as a descriptor, and that keeps what it has."""
        pool = cls()
        properties = _Properties(_PINNED_MEMORY, _FD, _Location(_DEVICE, 0))
        pool._call("cuMemPoolCreate", ctypes.byref(pool._handle), ctypes.byref(properties))
        keep = _u64(2**64 - 1)
        pool._call("cuMemPoolSetAttribute", pool._handle, _int(_RELEASE_THRESHOLD), ctypes.byref(keep))
        return pool

    @classmethod
    def imported(cls, fd):
        """Another process's pool."""
        pool = cls()
        pool._call("cuMemPoolImportFromShareableHandle", ctypes.byref(pool._handle), _void(fd), _int(_FD), _u64(0))
        access = _Access(_Location(_DEVICE, 0), _READ_WRITE)
        pool._call("cuMemPoolSetAccess", pool._handle, ctypes.byref(access), ctypes.c_size_t(1))
        return pool

    def export(self):
        """A descriptor of the pool."""
        fd = _int()
        self._call("cuMemPoolExportToShareableHandle", ctypes.byref(fd), self._handle, _int(_FD), _u64(0))
        return fd.value

    def allocate(self, nbytes):
        """The address of a block."""
        address = _u64()
        self._call("cuMemAllocFromPoolAsync", ctypes.byref(address), ctypes.c_size_t(nbytes), self._handle, _void(0))
        self._wait()
        return address.value

    def export_pointer(self, address):
        """What stands for a block in another process."""
        data = (ctypes.c_ubyte * POINTER_BYTES)()
        self._call("cuMemPoolExportPointer", ctypes.byref(data), _u64(address))
        return bytes(data)

    def import_pointer(self, data):
        """The address of another process's block here."""
        address = _u64()
        buffer = (ctypes.c_ubyte * POINTER_BYTES).from_buffer_copy(data)
        self._call("cuMemPoolImportPointer", ctypes.byref(address), self._handle, ctypes.byref(buffer))
        return address.value

    def free(self, address):
        """Gives a block, or an imported one, back."""
        self._call("cuMemFreeAsync", _u64(address), _void(0))
        self._wait()

    def _wait(self):
        self._call("cuStreamSynchronize", _void(0))
