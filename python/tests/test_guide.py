"""The guide's snippets run as they stand, on the host driver where there is no GPU."""

import glob
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from conftest import PACKAGE, ROOT, native

pytestmark = native
PAGES = sorted(glob.glob(os.path.join(ROOT, "docs", "guide", "*.md")))
FENCE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def snippets():
    for page in PAGES:
        with open(page, encoding="utf-8") as f:
            found = FENCE.findall(f.read())
        files = {m.group(1): code for code in found if (m := re.match(r"# file: (\S+)\n", code))}
        for number, code in enumerate(c for c in found if c.startswith("# test")):
            needs = re.match(r"# test(?:: needs (.*))?\n", code).group(1) or ""
            yield pytest.param(code, files, needs.split(), id=f"{os.path.basename(page)}-{number}")


def test_there_is_a_page_for_each_door():
    assert len(PAGES) >= 9
    index = open(os.path.join(ROOT, "docs", "guide", "README.md"), encoding="utf-8").read()
    for page in PAGES:
        assert os.path.basename(page) == "README.md" or os.path.basename(page) in index


@pytest.mark.parametrize("code, files, needs", list(snippets()))
def test_a_snippet_runs(code, files, needs, tmp_path):
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "snippet.py").write_text(code)
    env = {k: v for k, v in os.environ.items() if not k.startswith("MILLPOND_") or k in ("MILLPOND_LIBRARY", "MILLPOND_PROGRAM")}
    env["PYTHONPATH"] = os.pathsep.join(p for p in (env.get("PYTHONPATH", PACKAGE), str(tmp_path)) if p)
    env["RAY_AUTH_MODE"] = "disabled"
    done = subprocess.run([sys.executable, "snippet.py"], cwd=tmp_path, env=env, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout.decode()[-4000:]


def test_every_snippet_parses():
    for page in PAGES:
        with open(page, encoding="utf-8") as f:
            for code in FENCE.findall(f.read()):
                compile(code, page, "exec")
