"""A pack: what ``ci/gpu/check.sh --pack DIR`` uses on a GPU machine without a network. ``ci/gpu/pack.sh`` makes it.

    pack.py DIR SECONDS [MODULE:STEP...]    compile the kernels of these steps (``ahead.py``) with the Triton of this
                                            Python, in this time; another call goes on, with what is in DIR.cache

DIR/kernels.tar.xz    Triton's cache: the compiled kernels, and where gcc is, the C modules that launch them
DIR/pack.json         with which Triton, for which GPU, and which kernels
DIR/wheels            as of ``ci/gpu/wheels.sh``
DIR/START             the command for the GPU machine

A kernel's key in the cache depends on its source, its specialisation and ``key``, and on no path. But files of the
cache list others of it by absolute paths, which are rewritten where it is unpacked: in DIR/cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
IMPORTED = [str(ROOT / part) for part in (".", "kernels", "tests", "tests/kernels", "ci/parity")]
"""Folders from which the steps import."""
CAPABILITY = 90
"""Of the GPU for which kernels are compiled: Hopper."""


def key() -> str:
    """Hash of what Triton puts into the keys of all kernels: its own files, and ptxas."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import triton_key

    return hashlib.sha256(
        f"{triton_key()}-{make_backend(GPUTarget('cuda', CAPABILITY, 32)).hash()}".encode()
    ).hexdigest()


def compiled(cache: Path) -> Counter[str]:
    """Kernel, or C module -> number of its specialisations in a cache."""
    return Counter(file.name.split(".")[0] for kind in ("cubin", "so") for file in cache.glob(f"*/*.{kind}"))


def make(folder: Path, seconds: float, steps: list[str]) -> None:
    """Compile, until this time is over, and pack what is compiled."""
    import triton

    until = time.monotonic() + seconds
    source = hashlib.sha256(b"".join(file.read_bytes() for file in sorted((ROOT / "kernels").rglob("*.py"))))
    cache = folder.with_name(f"{folder.name}.cache") / f"{key()[:16]}-{source.hexdigest()[:16]}"
    for made in (folder, cache):
        made.mkdir(parents=True, exist_ok=True)
    log = cache.with_name("make.log")
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as output:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1", "OMP_NUM_THREADS": "1"}
        environment |= stub_of_the_driver(Path(scratch))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*IMPORTED, os.environ.get("PYTHONPATH"))))
        command, parts = [sys.executable, str(HERE / "ahead.py"), scratch, *steps], range(os.cpu_count() or 1)
        running = [subprocess.Popen(command, env=environment, stdout=output, stderr=output) for _ in parts]
        try:
            failed = sum(process.wait(max(0.0, until - time.monotonic())) != 0 for process in running)
        except subprocess.TimeoutExpired:
            failed, last = 0, max(Path(scratch).glob("claimed-*"), key=lambda file: file.stat().st_mtime)
            name = last.name.removeprefix("claimed-")
            print(f"pack.py: {seconds:.0f} s are over, and it is at {name}; the same call again goes on from there")
        finally:
            for process in running:
                process.kill()
                process.wait()
    if failed or not (kernels := compiled(cache)):
        sys.exit(f"pack.py: no kernels, or not all: see {log}")
    with tarfile.open(folder / "kernels.tar.xz", "w:xz", preset=9) as archive:
        for entry in sorted(cache.iterdir()):
            archive.add(entry, entry.name)
    facts = {"triton": triton.__version__, "key": key(), "capability": CAPABILITY}
    facts["kernels"] = dict(sorted(kernels.items()))
    (folder / "pack.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "START").write_text(f'ci/gpu/check.sh --seconds 540 --out "${{OUT:-out/gpu}}" --pack {folder}\n')
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    made = f"{kernels.total()} kernels and C modules of Triton {triton.__version__} for sm_{CAPABILITY}"
    print(f"{made}; {used:.0f} s of processor time")


def stub_of_the_driver(folder: Path) -> dict[str, str]:
    """Environment variables with which Triton's C modules link, and load here, against a driver that does nothing; none
    without gcc: then the GPU's machine compiles them."""
    from triton.backends.nvidia import driver

    if shutil.which("gcc") is None:
        return {}
    sources = (Path(driver.__file__), Path(driver.__file__).with_suffix(".c"))
    names = {name for file in sources for name in re.findall(r"\bcu[A-Z]\w+", file.read_text())}
    (folder / "stub.c").write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(names)))
    library = "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(folder / library), str(folder / "stub.c")]
    subprocess.run(command, check=True)
    paths = filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))
    return {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def use(folder: Path) -> dict[str, str]:
    """Unpack, once: what the check compiles itself is kept beside it. Returns environment variables for the steps."""
    cache = (folder / "cache").resolve()
    if not cache.exists():
        new = cache.with_name(f"cache.{os.getpid()}")
        with tarfile.open(folder / "kernels.tar.xz") as archive:
            archive.extractall(new, filter="data")
        for group in new.glob("*/__grp__*.json"):
            names = json.loads(group.read_text())["child_paths"]
            paths = {name: str(cache / group.parent.name / name) for name in names}
            group.write_text(json.dumps({"child_paths": paths}))
        new.rename(cache)
    return {"TRITON_CACHE_DIR": str(cache), "CP_PLUGIN_PACK": str(folder.resolve())}


def describe() -> dict[str, Any]:
    """For the step ``environment``: whether the kernels of the pack in use fit this machine; {} without a pack."""
    folder = os.environ.get("CP_PLUGIN_PACK")
    if not folder:
        return {}
    facts = json.loads(Path(folder, "pack.json").read_text())
    same, other = "its key is that of the Triton here", "the Triton here has ANOTHER KEY: none is used"
    fits = same if facts["key"] == key() else other
    kernels = f"{sum(facts['kernels'].values())} and C modules for sm_{facts['capability']}"
    text = f"{kernels} by Triton {facts['triton']}; {fits}"
    cache = os.environ["TRITON_CACHE_DIR"]
    return {"pack": {"packed kernels": text, "cache": cache, "kernels": facts["kernels"]}}


def anew(pack: dict[str, Any]) -> str:
    """How many kernels were compiled beside the pack's, by name."""
    more = compiled(Path(pack["cache"])) - Counter(pack["kernels"])
    ours = {name: n for name, n in more.items() if name in pack["kernels"]}
    names = ", ".join(f"{name} {n}" for name, n in sorted(ours.items()))
    return f"{sum(ours.values())} of ours{f' ({names})' if names else ''}, {more.total() - sum(ours.values())} others"


if __name__ == "__main__":
    directory, limit, *chosen = sys.argv[1:]
    make(Path(directory), float(limit), chosen)
