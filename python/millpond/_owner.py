"""Starts the owner program and reads where it listens."""

import json
import os
import select
import shutil
import subprocess
import time

from . import errors


def program_path():
    """The `millpond` program: `MILLPOND_PROGRAM`, else in the package, else on the PATH."""
    chosen = os.environ.get("MILLPOND_PROGRAM")
    if chosen:
        return chosen
    packaged = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "millpond")
    if os.access(packaged, os.X_OK):
        return packaged
    found = shutil.which("millpond")
    if found:
        return found
    raise errors.OwnerUnavailable(
        f"the program millpond was not found (looked at MILLPOND_PROGRAM, {packaged} and PATH); set MILLPOND_PROGRAM, "
        'or say Arena(owner="inline")'
    )


class Owner:
    """The owner's process. It watches this one and ends with it."""

    def __init__(self, limit=None, driver="auto", devices=None, chunk_bytes=None, timeout=30.0, handle_kind=None):
        program = program_path()
        read_end, write_end = os.pipe()
        command = [program, "serve", "--parent-pid", str(os.getpid()), "--ready-fd", str(write_end), "--json"]
        for flag, value in (("--limit", limit), ("--driver", driver), ("--chunk-bytes", chunk_bytes), ("--handle-kind", handle_kind)):
            if value is not None:
                command += [flag, str(value)]
        for device in devices or ():
            command += ["--device", str(device)]
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=(write_end,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is the parent's affair
            )
        except OSError as e:
            os.close(read_end)
            raise errors.OwnerUnavailable(f"cannot start {command[0]}: {e}") from None
        finally:
            os.close(write_end)
        try:
            answer = self._read_answer(read_end, timeout)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(read_end)
        self.socket, self.key = answer["socket"], answer["key"]

    def _read_answer(self, fd, timeout):
        end = time.monotonic() + timeout
        text = b""
        while not text.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise errors.Timeout(f"the owner did not come up within {timeout} s")
            part = os.read(fd, 65536)
            if not part:
                break
            text += part
        try:
            answer = json.loads(text)
        except ValueError:
            code = self.process.wait(timeout=5)
            raise errors.OwnerUnavailable(f"the owner ended with code {code} before it was ready (its words are on stderr)") from None
        if "error" in answer:
            report = dict(answer["error"])
            raise errors.make(report.pop("code", "OwnerUnavailable"), report.pop("message", "the owner refused"), report)
        return answer

    def stop(self, timeout=5.0):
        """Ends the owner: asks first."""
        process = self.process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
