"""Processes in namespaces of their own, as in containers, over a shared socket folder."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

import millpond
from conftest import native

pytestmark = native
pytest.importorskip("numpy")

WORKER = """
import os, sys, time
import millpond
assert not os.listdir("/dev/shm"), "/dev/shm is shared"
millpond.attach()
conn = millpond.connection(timeout=20)
value = conn.recv(timeout=20)
value[...] = 5
conn.send({"pid": os.getpid(), "total": float(value.sum())})
conn.recv(timeout=20)
mine = millpond.empty((1000,), "float32")
mine[...] = 3
conn.send(mine)
conn.recv(timeout=20)
if "DIE" in os.environ:
    os.kill(os.getpid(), 9)
"""

PARENT = """
import json, os, sys, time
import millpond

arena = millpond.Arena(limit="64MiB", driver="host")
env = arena.worker_env("boxed")
with open(sys.argv[1] + ".part", "w") as f:
    json.dump(env, f)
os.rename(sys.argv[1] + ".part", sys.argv[1])
conn = arena.accept(timeout=30)
value = millpond.empty((1000,), "float32")
value[...] = 1
conn.send(value)
said = conn.recv(timeout=20)
assert said["total"] == 5000 and value[3] == 5, said
conn.send("more")
theirs = conn.recv(timeout=20)
assert theirs[999] == 3
conn.send("end")

def clients():
    return {c["name"] for d in arena.ledger()["devices"] for c in d["clients"]}

end = time.monotonic() + 20
assert theirs[999] == 3, "what it made outlives it"
del theirs
while "boxed" in clients():
    assert time.monotonic() < end, arena.ledger()
    time.sleep(0.01)
arena.close()
"""

#: A box has its own PIDs, IPC and /dev/shm; of /tmp it sees the owner's folder alone.
BOX = ["unshare", *(["--user", "--map-root-user"] if os.getuid() else []), "--pid", "--ipc", "--uts", "--mount", "--fork"]
BOX += ["--kill-child", "--mount-proc", "sh", "-c"]
ENTER = 'mount -t tmpfs none /dev/shm; exec "$@"'


def boxes_work():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*BOX, ENTER, "box", "true"], stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture(autouse=True)
def boxes():
    if not boxes_work():
        pytest.skip("no namespaces here: needs root, or user namespaces, and unshare")


def test_a_worker_in_a_box(tmp_path):
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        process = subprocess.Popen([*BOX, ENTER, "box", sys.executable, "-c", WORKER], env=arena.worker_env("boxed"))
        with arena.accept(timeout=30) as conn:
            value = millpond.empty((1000,), "float32")
            value[...] = 1
            conn.send(value)
            said = conn.recv(timeout=20)
            assert said == {"pid": 1, "total": 5000.0} and value[3] == 5
            conn.send("more")
            assert conn.recv(timeout=20)[999] == 3
            conn.send("end")
        assert process.wait(20) == 0


def test_a_worker_that_sees_the_sockets_folder_alone(monkeypatch):
    run = tempfile.mkdtemp(prefix="mp-")  # what is hidden holds nothing but the socket's folder
    monkeypatch.setenv("XDG_RUNTIME_DIR", run)
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        env = arena.worker_env("boxed")
        folder = os.path.dirname(env["MILLPOND_SOCKET"])
        assert folder.startswith(run)
        hide = 'mkdir -p /mnt/box && mount --bind "$FOLDER" /mnt/box && mount -t tmpfs none "$RUN" && mkdir -p "$FOLDER" && mount --bind /mnt/box "$FOLDER"; '
        process = subprocess.Popen([*BOX, hide + ENTER, "box", sys.executable, "-c", WORKER], env=dict(env, FOLDER=folder, RUN=run))
        with arena.accept(timeout=30) as conn:
            value = millpond.empty((1000,), "float32")
            conn.send(value)
            assert conn.recv(timeout=20)["total"] == 5000
            conn.send("more")
            assert conn.recv(timeout=20)[0] == 3
            conn.send("end")
        assert process.wait(20) == 0


@pytest.mark.parametrize("death", [False, True])
def test_parent_and_worker_in_boxes_of_their_own(tmp_path, death):
    """Siblings: neither has a number in the other's PID namespace."""
    path = str(tmp_path / "env.json")
    parent = subprocess.Popen([*BOX, ENTER, "box", sys.executable, "-c", PARENT, path])
    worker = None
    try:
        end = time.monotonic() + 30
        while not os.path.exists(path):
            assert parent.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        with open(path) as f:
            env = json.load(f)
        worker = subprocess.Popen([*BOX, ENTER, "box", sys.executable, "-c", WORKER], env=dict(env, **({"DIE": "1"} if death else {})))
        assert parent.wait(60) == 0
        worker.wait(20)
    finally:
        for process in (parent, worker):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def test_another_user_is_refused_by_name():
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        env = arena.worker_env("stranger")
        code = "import millpond\ntry:\n    millpond.attach()\nexcept millpond.Error as e:\n    print(type(e).__name__, e)"
        drop = ["setpriv", "--reuid=65534", "--clear-groups"] if shutil.which("setpriv") else None
        if drop is None:
            pytest.skip("no setpriv here")
        done = subprocess.run([*drop, sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        assert "Refused" in done.stdout or "OwnerUnavailable" in done.stdout, done.stdout
