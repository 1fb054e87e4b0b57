"""Damaged checkpoint folders: find complete checkpoints, repair the tracker file, explain unreadable checkpoints.

    FOLDER/latest_checkpointed_iteration.txt    written last, in place: a kill in between leaves it empty
    FOLDER/iter_0000020/                        written before

With an empty tracker file Megatron exits with status 0; here it is repaired to name the newest complete checkpoint.
Everything else that cannot be read is refused, naming the complete checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from cp_plugin.megatron.startup import failures

LATEST = "latest_checkpointed_iteration.txt"


@contextlib.contextmanager
def readable(folder: str | None, step: int | None) -> Iterator[None]:
    """Turn errors of reading a checkpoint into ValueErrors that name it, the cause, and the complete ones.

    step: the value of ``--ckpt-step``.
    """
    asked = check(folder, step)
    try:
        yield
    except (*failures.ENDS, SystemExit) as error:  # Megatron exits with status 0 if a `torch` file is bad
        if folder is None or not Path(folder, LATEST).is_file():
            raise
        raise _unreadable(folder, asked, error) from error


def check(folder: str | None, step: int | None) -> int | None:
    """Repair the tracker file, and return the iteration to be read, if known; ValueError if it is not complete.

    Collective if torch.distributed is initialized.
    """
    if folder is None or not Path(folder, LATEST).is_file():
        return None
    repair_latest(Path(folder))
    asked = step or latest(Path(folder))
    if asked is not None and asked not in (found := iterations(Path(folder))):
        raise ValueError(
            f"--load {folder}: the checkpoint of iteration {asked} is missing or incomplete. {_instead(found)}"
        )
    return asked


def latest(folder: Path) -> int | None:
    """The iteration in the tracker file; None for a ``release``, and without the file."""
    file = folder / LATEST
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def iterations(folder: Path) -> list[int]:
    """The iterations of all complete checkpoints."""
    found = (re.fullmatch(r"iter_(\d+)", path.name) for path in folder.iterdir() if _complete(path))
    return sorted(int(match[1]) for match in found if match)


def repair_latest(folder: Path) -> None:
    """If the tracker file holds no iteration, write the newest complete one; ValueError if there is none.

    Collective if torch.distributed is initialized.
    """
    text = (folder / LATEST).read_text(errors="replace").strip()
    broken = not text.isdecimal() and text != "release"
    ranked = dist.is_initialized()
    if ranked:
        dist.barrier()  # all ranks read it before one repairs it
    if not broken:
        return
    found = iterations(folder)
    if not found:
        raise ValueError(
            f"--load {folder}: {LATEST} says {text!r}, but it contains no complete checkpoint. Start without --load, "
            "or from another folder"
        )
    if not ranked or dist.get_rank() == 0:
        print(
            f"cp_plugin: {folder / LATEST} says {text!r}: a run was stopped while writing it. Using iteration "
            f"{found[-1]}, the newest complete checkpoint",
            flush=True,
        )
        mended = folder / f"{LATEST}.new"
        mended.write_text(str(found[-1]))
        os.replace(mended, folder / LATEST)
    if ranked:
        dist.barrier()


def _complete(path: Path) -> bool:
    """Distributed checkpoints: ``.metadata`` gets its name after all data is written. Others: any weights.

    ``torch_dist`` also writes ``metadata.json``; ``torch_dcp`` and ``fsdp_dtensor`` do not. A folder has one format.
    """
    if not path.is_dir():
        return False
    if any(path.glob("*.distcp")) or (path / "metadata.json").exists():
        torch_dist = any(path.parent.glob("iter_*/metadata.json"))
        return _whole_pickle(path / ".metadata") and (not torch_dist or (path / "metadata.json").is_file())
    return any(path.glob("mp_rank_*/*.pt"))


def _whole_pickle(path: Path) -> bool:
    """Whether the file exists and is not truncated, by its frame lengths and last byte; nothing is unpickled."""
    if not path.is_file():
        return False
    size = path.stat().st_size
    with path.open("rb") as file:
        end = len(file.read(2))  # the protocol; then frames: an opcode, the length in 8 bytes, so many bytes
        while end < size and (head := file.read(9))[:1] == pickle.FRAME:
            end = file.tell() + int.from_bytes(head[1:], "little")
            file.seek(end)
        file.seek(max(size - 1, 0))
        return end <= size and file.read() == pickle.STOP


def _unreadable(folder: str, asked: int | None, error: BaseException) -> ValueError:
    name = "the checkpoint" if asked is None else f"the checkpoint of iteration {asked}"
    cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
    others = [i for i in iterations(Path(folder)) if i != asked]
    return ValueError(f"--load {folder}: {name} cannot be read ({failures.summary(cause)}). {_instead(others)}")


def _instead(found: list[int]) -> str:
    if not found:
        return "There is no other complete checkpoint: start without --load, or from another folder"
    return f"Complete checkpoints: {', '.join(map(str, found))}; choose one with --ckpt-step {found[-1]}"
