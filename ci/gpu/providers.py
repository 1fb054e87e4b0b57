"""Every provider with every kernel that runs here, on rank threads, against attention in float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from cases import Case, cannot, cases, errors, heads, of_setup, possible
from record import Found, Row, Step, found_by, worst
from spread import check_each


def main() -> None:
    with Step("providers") as step:
        for backend, reason in possible(step.device).items():
            if reason:
                step.not_run(f"providers with backend {backend}", reason)
        groups = defaultdict(list)
        for case in cases(step.device, smoke=step.smoke):
            groups[case.group, heads(case.problem)].append(case)
        check_each(step, run, list(groups.values()), named)


def named(group: list[Case]) -> tuple[str, str]:
    return group[0].group, f"{len(group)} cases of {heads(group[0].problem)}"


def run(group: list[Case]) -> Iterator[Row]:
    """Cases of one kernel and one shape."""
    for case in group:
        ok, detail = found_by(partial(one, case))
        yield case.group, str(case), ok, {"of": of_setup(case.setup)} | detail


def one(case: Case) -> Found:
    setup, device = case.setup, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := cannot(setup, device):
        return None, {"reason": reason}
    return worst(*errors(setup, case.documents, device))


if __name__ == "__main__":
    main()
