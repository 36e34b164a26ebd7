"""Builds the native parts with cargo and puts them into the wheel.

One wheel serves every Python 3.9 and later: `py3-none-<platform>`. The platform is that of this machine (`linux_x86_64`: it
needs this machine's glibc or a newer one). For a `manylinux_2_28` wheel build with cargo-zigbuild
(`cargo zigbuild --release --target x86_64-unknown-linux-gnu.2.28`), then set

    MILLPOND_PREBUILT=DIR              take libmillpond_torch.so and millpond from DIR, and do not run cargo
    MILLPOND_WHEEL_PLATFORM=manylinux_2_28_x86_64
"""

import os
import subprocess
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILDS = (
    ["-p", "millpond-torch"],
    ["-p", "millpond-ipc", "--features", "cli", "--bin", "millpond"],
)


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "editable":
            return  # the library is found by MILLPOND_LIBRARY, the program by MILLPOND_PROGRAM
        root = os.path.dirname(self.root)
        folder = os.environ.get("MILLPOND_PREBUILT") or self._cargo(root)
        library = self._existing(folder, "libmillpond_torch.so")
        program = self._existing(folder, "millpond")
        header = self._existing(os.path.join(root, "torch-plugin", "include"), "millpond.h")
        platform = os.environ.get("MILLPOND_WHEEL_PLATFORM") or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"].update(
            {
                library: "millpond/libmillpond_torch.so",
                program: "millpond/bin/millpond",
                header: "millpond/include/millpond.h",
            }
        )
        build_data["shared_scripts"][program] = "millpond"

    def _cargo(self, root):
        for build in _BUILDS:
            command = ["cargo", "build", "--release", "--locked", *build]
            self.app.display_info(" ".join(command))
            try:
                subprocess.run(command, cwd=root, check=True)
            except FileNotFoundError:
                raise SystemExit(
                    "cargo was not found: millpond builds its native library from source (https://rustup.rs), or set "
                    "MILLPOND_PREBUILT to a folder with libmillpond_torch.so and millpond"
                ) from None
        return os.path.join(os.environ.get("CARGO_TARGET_DIR") or os.path.join(root, "target"), "release")

    def _existing(self, folder, name):
        path = os.path.join(os.path.abspath(folder), name)
        if not os.path.exists(path):
            raise SystemExit(f"{path} does not exist")
        return path
