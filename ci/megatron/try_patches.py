"""Patch unpacked wheels and checkouts, and train an unmodified script on 2 context-parallel ranks and on 1."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from replay import version_of
from training import DATA, MODEL, SGD

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = ROOT / "patches" / "megatron-lm"
FOLDERS = {"0.18": "core_v0.18.2", "0.19": "core_v0.19.x", "0.20": "main"}
FLAGS = f"{MODEL} {DATA} {SGD} --train-iters 3 --cp-device cpu"
CLOSE = 2e-6  # precision of six printed digits


def main(names: list[str]) -> int:
    """names: versions of unpacked wheels, or directories of checkouts."""
    for name in names:
        source = Path(name) if Path(name).is_dir() else ROOT / ".venv" / "megatron" / name
        with tempfile.TemporaryDirectory() as folder:
            try_version(source, Path(folder))
    check_main()
    return 0


def try_version(source: Path, folder: Path) -> None:
    """Patch a copy of an unpacked wheel or a checkout, and train with it."""
    version = version_of(source)
    shutil.copytree(source / "megatron", folder / "megatron")
    patch = PATCHES / FOLDERS[_minor(source)] / "plugins.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    if "def plugins" not in (folder / "megatron" / "training" / "arguments.py").read_text():
        raise SystemExit(f"{patch} was not applied")
    script = find_script(source, folder)
    alone = train(script, folder, 1, "")
    divided = train(script, folder, 2, "--context-parallel-size 2 --cp-provider striped")
    if "2 of 2 replaced" not in divided or "self-check passed" not in divided:
        raise SystemExit(f"megatron-core {version}: the plugin did not start\n{divided}")
    if "arguments:validate_args" in divided:
        raise SystemExit(f"megatron-core {version}: the plugin wrapped Megatron's command line, which asks it")
    one, two = (re.findall(r"lm loss: (\S+)", output) for output in (alone, divided))
    errors = [abs(float(a) / float(b) - 1) for a, b in zip(one, two, strict=True)]
    if len(errors) != 3 or max(errors) > CLOSE:
        raise SystemExit(f"megatron-core {version}: losses {one} on one rank, {two} on two")
    print(
        f"PASS {patch.relative_to(ROOT)}: megatron-core {version}, {script.name} by flags alone: {one[-1]}, {two[-1]}"
    )


def find_script(source: Path, folder: Path) -> Path:
    """Megatron-LM's script if there is a checkout of that minor version; otherwise the replacement."""
    for checkout in (source, Path(os.environ.get("MEGATRON_LM_PATH", ""))):
        if (checkout / "pretrain_gpt.py").is_file() and _minor(checkout) == _minor(source):
            for path in checkout.glob("*.py"):  # beside the patched Megatron, not beside the checkout's own
                shutil.copy(path, folder)
            return folder / "pretrain_gpt.py"
    return HERE / "stock_gpt.py"


def _minor(source: Path) -> str:
    return version_of(source).rpartition(".")[0]


def train(script: Path, folder: Path, ranks: int, flags: str) -> str:
    """What a training run prints; it ends this program if it fails."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={ranks}", str(script), *FLAGS.split(), *flags.split()]
    world = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, env=world, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stdout}")
    return done.stdout


def check_main() -> None:
    """Check that the patch for the main branch applies to its newest commit."""
    repository = os.environ.get("MEGATRON_LM_GIT")
    if repository is None:
        print("SKIPPED patches/megatron-lm/main at its newest: MEGATRON_LM_GIT names no git directory with it")
        return
    path = Path("megatron/training/arguments.py")
    show = ["git", f"--git-dir={repository}", "show", f"HEAD:{path}"]
    newest = subprocess.run(show, capture_output=True)
    if newest.returncode:
        raise SystemExit(f"MEGATRON_LM_GIT={repository}: {newest.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path).parent.mkdir(parents=True)
        (Path(folder) / path).write_bytes(newest.stdout)
        subprocess.run(["git", "apply", str(PATCHES / "main" / "plugins.patch")], cwd=folder, check=True)
        compile((Path(folder) / path).read_text(), str(path), "exec")
    print("PASS patches/megatron-lm/main applies")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
