"""Medians and quartiles of slices, and of the ratios of neighbours."""

import statistics


def spread(values):
    """{"median", "q1", "q3", "n"} of some figures."""
    values = sorted(values)
    if len(values) < 2:
        q1 = q3 = values[0]
    else:
        q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": digits(statistics.median(values)), "q1": digits(q1), "q3": digits(q3), "n": len(values)}


def digits(value, count=4):
    """So many significant digits: more would be noise."""
    return float(f"{value:.{count}g}")


class Pairs:
    """Slices of ours and of the others, as they were measured beside each other."""

    def __init__(self):
        self.slices = {}  # (case, mode) -> ns an operation
        self.ratios = {}  # (case, mode) -> ours / theirs

    def add(self, case, mode, mine, theirs):
        """Two neighbouring slices."""
        self.alone(case, "ours", mine)
        self.alone(case, mode, theirs)
        self.ratios.setdefault((case, mode), []).append(mine / theirs)

    def alone(self, case, mode, value):
        """A slice that has no neighbour."""
        self.slices.setdefault((case, mode), []).append(value)

    def table(self):
        """{case: {mode: {"ns": spread, "ours_over": spread}}}; ours has no ratio."""
        cases = {}
        for (case, mode), values in self.slices.items():
            row = cases.setdefault(case, {}).setdefault(mode, {})
            row["ns"] = spread(values)
            if (case, mode) in self.ratios:
                row["ours_over"] = spread(self.ratios[case, mode])
        return cases
