"""Every provider with every kernel that runs here, on rank threads, against attention in float64."""

from __future__ import annotations

from collections import defaultdict

import torch
from attend import Refused, errors, interpret_one_at_a_time
from cases import Case, cases, possible
from record import OUT_OF_TIME, Step, in_a_line, worst
from spread import Row, spread


def main() -> None:
    with Step("providers") as step:
        for backend, reason in possible(step.device).items():
            if reason:
                step.not_run(f"providers with backend {backend}", reason)
        if step.smoke:
            interpret_one_at_a_time()
        groups = defaultdict(list)
        for case in cases(step.device, smoke=step.smoke):
            groups[case.group, case.shape].append(case)
        for of_group, rows in spread(run, list(groups.values()), here=step.smoke, seconds=step.left):
            if isinstance(rows, str):
                at, name = of_group[0], f"{len(of_group)} cases of {of_group[0].shape}"
                if rows == OUT_OF_TIME:
                    step.not_run(f"{at.group}: {name}", rows)
                else:
                    step.check(at.group, name, False, failure=rows)
                continue
            for group, name, ok, detail in rows:
                if ok is None:
                    step.not_run(f"{group}: {name}", detail["reason"])
                else:
                    step.check(group, name, ok, **detail)


def run(group: list[Case]) -> list[Row]:
    """Cases of one kernel and one shape, one after the other; after an error of the device none is tried."""
    rows: list[Row] = []
    lost = ""
    for case in group:
        if lost:
            rows.append((case.group, str(case), False, {"failure": f"not tried: {lost}"}))
            continue
        try:
            rows.append(one(case))
        except Exception as error:  # of any library
            failure = in_a_line(error)
            rows.append((case.group, str(case), False, {"failure": failure}))
            if "CUDA error" in failure:
                lost = f"the device was lost in {case}"
    return rows


def one(case: Case) -> Row:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found, limits = errors(case, device)
    except Refused as refused:
        return case.group, str(case), None, {"reason": str(refused)}
    return case.group, str(case), *worst(found, limits)


if __name__ == "__main__":
    main()
