"""What a suite runs: few cases of a product of parameters."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import execnet
import nightly
import pytest
from nightly import covering


class Item:
    """A collected test."""

    def __init__(self, name: str, params: dict[str, str], mark: pytest.MarkDecorator | None = None) -> None:
        self.nodeid, self.callspec = f"{name}{[*params.values()]}", SimpleNamespace(params=params)
        self._mark = mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._mark and self._mark.mark


PRODUCT = [dict(zip("abc", places, strict=True)) for places in product("0123456", "012", "01")]


@pytest.mark.parametrize(("strength", "fewest"), [(0, 1), (1, 7), (2, 21), (3, 42)])
def test_every_combination_occurs_in_few_cases(strength: int, fewest: int) -> None:
    kept = [PRODUCT[place] for place in covering(PRODUCT, strength)]
    for names in combinations("abc", strength):
        assert {tuple(case[n] for n in names) for case in kept} == {tuple(case[n] for n in names) for case in PRODUCT}
    assert fewest <= len(kept) <= 1.25 * fewest


@pytest.mark.parametrize(("suite", "fewest"), [((), 1), (("NIGHT",), 21), (("NIGHT", "PRODUCT"), 42)])
def test_what_a_suite_leaves_out_is_counted(suite: tuple[str, ...], fewest: int, monkeypatch: Any) -> None:
    for name in ("NIGHT", "PRODUCT"):
        monkeypatch.setattr(nightly, name, name in suite)

    other = [Item("of two", case) for case in PRODUCT[:2]]
    items = [*other, *(Item("product", case, nightly.one_case) for case in PRODUCT)]
    left_out = nightly.thin(items)
    kept = len(items) - len(other)
    assert items[:2] == other and fewest <= kept <= 1.25 * fewest
    assert left_out == ({} if kept == 42 else {("product", nightly.REDUNDANT): 42 - kept})
    assert execnet.loads(execnet.dumps(left_out)) == left_out  # a pytest-xdist worker sends it when it ends
