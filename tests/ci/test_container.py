"""Installing into an NVIDIA container replaces none of its packages: pip keeps what a requirement's specifier contains.

The images have versions that PEP 440 sorts before their release (``2.11.0a0+eb65b36914.nv26.02`` < ``2.11.0``).
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIRES = [Requirement(line) for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]]
OTHERS = [Requirement("torch>=2.6.0"), Requirement("numpy")]
"""What megatron-core requires of them."""
IMAGE = {"numpy": "2.1.0", "triton": "3.5.1+gitbfeb0666"}
IMAGE |= {"transformer-engine": "2.12.0+5671fd36", "flash-attn": "2.7.4.post1+25.11", "apex": "0.1"}
"""What an image has beside torch, versions as NVIDIA writes them."""


def replaced(requirements: list[Requirement], image: dict[str, str]) -> list[str]:
    """The packages of the image that pip would replace, which looks at what is installed with pre-releases."""
    known = [one for one in requirements if one.name in image]
    return [one.name for one in known if not one.specifier.contains(image[one.name], prereleases=True)]


@pytest.mark.parametrize("torch", ["2.11.0a0+eb65b36914.nv26.02", "2.10.0a0+b4e4ee81d3.nv25.12"])
def test_nothing_of_the_image_is_replaced(torch: str) -> None:
    image = IMAGE | {"torch": torch}
    assert not replaced(REQUIRES + OTHERS, image)
    assert replaced([Requirement("torch>=2.11")], image) == ["torch"], "a range without pre-releases"
