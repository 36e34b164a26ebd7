"""What `Arena.worker_env()` puts on a worker's PYTHONPATH: this package under its name, and nothing else that happens to be
installed beside it, for the worker may be another Python with packages of its own."""

import os as _os

_folder = _os.path.dirname(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))
__path__ = [_folder]
__file__ = _os.path.join(_folder, "__init__.py")
with open(__file__, encoding="utf-8") as _source:
    exec(compile(_source.read(), __file__, "exec"))
