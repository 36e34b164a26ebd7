"""What replays say: a row for each trace and allocator, and the targets for each trace."""

from . import modes

MIB = 1 << 20
#: Traces whose names hold this are held to the training target.
TRAINING = "train"
MOST_TRAINING = 1.10
MOST_NS = 1000

COLUMNS = (
    "trace",
    "allocator",
    "peak reserved",
    "/ live",
    "growths",
    "failed",
    "p50",
    "p99",
    "p99.9",
    "p99.9 without growth",
    "of the calls' medians",
    "longest",
    "a call, ours / its",
)


def table(found, time):
    """The rows of a section's table, as Markdown; `time` writes nanoseconds for a person."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    clocks, apart, before, failures = set(), [], [], []
    for trace, row in found["traces"].items():
        for mode in in_order(row):
            cell = row[mode]
            pair = found["cases"].get(trace, {}).get(mode, {})
            lines.append("| " + " | ".join(_row(trace, mode, cell, pair, time)) + " |")
            clocks.add(cell["clock_ns"])
            if cell.get("replays_that_grew_otherwise"):
                apart.append(f"{trace} {mode}: {cell['replays_that_grew_otherwise']} of {cell['replays']}")
            if cell.get("reserved_before"):
                before.append(f"{trace} {mode}: {size(cell['reserved_before'])}")
            if cell["failed"]:
                failures.append(f"{trace} {mode}: {cell['failed']}, the first: {cell.get('first_failure')}")
    if len(lines) == 2:
        return ["Nothing was measured."]
    lines += ["", f"{found['rounds']} rounds. A slice here is a whole trace, from an allocator that has nothing cached, on one thread, after one that is not timed; no byte is touched."]
    lines += [f"The clock's own time is in each figure: {' to '.join(f'{ns:g} ns' for ns in sorted({min(clocks), max(clocks)}))}."]
    lines += ["Of the calls' medians: p99.9 over the trace's calls without growth of each one's median over the rounds: an interrupt hits one round."]
    lines += ["Live: the most bytes that the trace has at a time, each block rounded up to 512. –: the allocator does not tell, or was not timed."]
    for what, which in (("Failed", failures), ("Still reserved at the start", before), ("Replays that grew at other calls than the first", apart)):
        lines += [f"* {what}: {'; '.join(which)}."] if which else []
    return lines


def _row(trace, mode, cell, pair, time):
    ns, steady, ratio = cell["ns"], cell["ns_without_growth"], pair.get("ours_over")
    own = cell.get("ns_without_growth_medians")
    none = "–"
    return [
        f"{trace} ({size(cell['peak_live'])} live)",
        mode,
        none if cell["peak_reserved"] is None else size(cell["peak_reserved"]),
        none if cell["ratio"] is None else f"**{cell['ratio']:.3f}**",
        none if cell["growths"] is None else str(cell["growths"]),
        str(cell["failed"]),
        *(time(ns[key]) if ns else none for key in ("p50", "p99", "p999")),
        time(steady["p999"]) if steady else none,
        time(own["p999"]) if own else none,
        time(ns["max"]) if ns else none,
        f"×{ratio['median']:.3g}" if ratio else none,
    ]


def in_order(row):
    """The allocators of a row, as the section lists them."""
    known = list(modes.MODES["replay"])
    return sorted(row, key=lambda mode: known.index(mode) if mode in known else len(known))


def size(nbytes):
    """Bytes as MiB."""
    return f"{nbytes / MIB:.5g} MiB"


def targets(found):
    """(what, found, at most) of each trace. What an allocator does not tell is left out."""
    rows = []
    for trace, row in found.get("traces", {}).items():
        ours = row.get("ours")
        if ours is None:
            continue
        reserved = lambda mode: row.get(mode, {}).get("peak_reserved")  # noqa: E731
        rows.append((f"replay {trace}: failed calls, ours", ours["failed"], 0))
        mine = ours["peak_reserved"]
        if mine is not None and reserved("native") is not None:
            rows.append((f"replay {trace}: peak reserved / peak live, ours (at most native's)", ours["ratio"], row["native"]["ratio"]))
        if mine is not None and reserved("expandable") is not None and ours["largest_growth"]:
            chunks = round(max(0, mine - reserved("expandable")) / ours["largest_growth"], 3)
            what = f"replay {trace}: reserved beyond expandable's, in chunks of {size(ours['largest_growth'])}, the largest growth"
            rows.append((what, chunks, 1))
        if ours["ratio"] is not None and TRAINING in trace.lower():
            rows.append((f"replay {trace}: peak reserved / peak live, ours", ours["ratio"], MOST_TRAINING))
        if ours.get("ns_without_growth_medians"):
            what = f"replay {trace}: p99.9 of the calls' medians without growth, ours, ns"
            rows.append((what, ours["ns_without_growth_medians"]["p999"], MOST_NS))
    return rows


def figures(found):
    """Ratios and times by allocator and trace: {"replay_reserved_over_live": {...}, "replay_p999_ns": {...}, ...}."""
    out = {}
    for trace, row in found.get("traces", {}).items():
        for mode, cell in row.items():
            steady = cell["ns_without_growth"]
            for name, value in (
                ("reserved_over_live", cell["ratio"]),
                ("p999_ns", cell["ns"] and cell["ns"]["p999"]),
                ("p999_without_growth_ns", steady and steady["p999"]),
                ("p999_of_medians_ns", (cell.get("ns_without_growth_medians") or {}).get("p999")),
            ):
                if value is not None:
                    out.setdefault(f"replay_{name}", {}).setdefault(mode, {})[trace] = value
    return out
