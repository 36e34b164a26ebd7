"""What a comparison says: a Markdown table a section, the figures and targets for machines."""

from . import modes, replayed

TITLES = {"allocation": "Allocation", "replay": "Traces replayed", "handoff": "Hand-off on the GPU", "host-handoff": "Hand-off in host memory"}


def time(ns):
    """A time as a person reads it."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= 0.9995 * factor:  # what would be written as 1,000 of the next smaller
            return f"{ns / factor:.3g} {unit}"
    return f"{ns:.3g} ns"


def markdown(report):
    """The whole comparison as text."""
    machine = report["machine"]
    lines = ["# millpond compared", ""]
    lines += [f"* {key}: {value}" for key, value in machine.items() if value not in (None, "")]
    lines += ["", method(report), ""]
    for section, found in report["sections"].items():
        lines += [f"## {TITLES.get(section, section)}", ""]
        lines += table(section, found)
        lines += [""]
    missing = dict(report["cannot"])
    missing.update((f"{section} {mode}", why) for section, found in report["sections"].items() for mode, why in found["failed"].items())
    if missing:
        lines += ["## Not measured here", ""]
        lines += [f"* {name}: {' '.join(why.split())[:600]}" for name, why in missing.items()]
        lines += [""]
    if report["notes"]:
        lines += ["## Notes", ""]
        lines += [f"* {name}: {' '.join(str(note).split())[:300]}" for name, note in report["notes"].items()]
        lines += [""]
    targets = report["figures"].get("targets")
    if targets:
        lines += ["## Targets", "", "| what | found | at most | |", "| --- | --- | --- | --- |"]
        lines += [f"| {row['what']} | {row['found']} | {row['at_most']} | {'met' if row['met'] else 'missed'} |" for row in targets]
        lines += [""]
    return "\n".join(lines)


def method(report):
    """How it was measured, in a sentence."""
    how = report["method"]
    sets = f", {how['pairs']} sets of them one after another" if how.get("pairs", 1) > 1 else ""
    return (
        f"Each mode is a process{sets}, all alive and on CPU {how['cpu']}, the owner of ours on another core; slices of {how['slice_ms']:g} ms, ours and another's in turn. Of each: "
        "the median of its slices (quartiles), an operation; below it ours / its, the median of the rounds' neighbours (quartiles). "
        "Under 1: ours is faster."
    )


def table(section, found):
    """A row for each case, a column for each mode; of replays a row for each of both."""
    if "traces" in found:
        return replayed.table(found, time)
    columns = [mode for mode in modes.MODES.get(section, {}) if any(mode in row for row in found["cases"].values())]
    columns += sorted({mode for row in found["cases"].values() for mode in row} - set(columns))
    if not columns:
        return ["Nothing was measured."]
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for case, row in found["cases"].items():
        cells = []
        for mode in columns:
            cell = row.get(mode)
            if cell is None:
                cells.append("–")
                continue
            ns, ratio = cell["ns"], cell.get("ours_over")
            text = f"**{time(ns['median'])}** ({time(ns['q1'])} to {time(ns['q3'])})"
            if ratio:
                text += f"<br>×{ratio['median']:.3g} ({ratio['q1']:.3g} to {ratio['q3']:.3g})"
            cells.append(text)
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    lines += ["", f"{found['rounds']} rounds."]
    return lines


def figures(sections):
    """The medians by mode, the ratios by mode, and the targets: for those who read many runs."""
    out = {}
    for section, found in sections.items():
        name = section.replace("-", "_")
        ours, over = {}, {}
        for case, row in found["cases"].items():
            for mode, cell in row.items():
                out.setdefault(name, {}).setdefault(mode, {})[case] = round(cell["ns"]["median"] / 1e3, 3)
                if "ours_over" in cell:
                    over.setdefault(mode, {})[case] = cell["ours_over"]["median"]
        ours.update(over)
        for mode, ratios in ours.items():
            out[f"{name}_ours_over_{mode.replace('-', '_')}"] = ratios
    out.update(replayed.figures(sections.get("replay", {})))
    out["targets"] = targets(sections)
    return out


def targets(sections):
    """The project's targets that this measures, each with what was found."""
    rows = []

    def row(what, value, most):
        if value is not None:
            rows.append({"what": what, "found": value, "at_most": most, "met": value <= most})

    def over(section, case, mode):
        cell = sections.get(section, {}).get("cases", {}).get(case, {}).get(mode, {})
        return cell.get("ours_over", {}).get("median")

    def ns(section, case, mode="ours"):
        cell = sections.get(section, {}).get("cases", {}).get(case, {}).get(mode, {})
        return cell.get("ns", {}).get("median")

    for size in ("1 KiB", "1 MiB", "64 MiB"):
        row(f"torch.empty+del {size}, ours / bump", over("allocation", f"torch.empty+del {size}", "bump"), 1.1)
        row(f"torch.empty+del {size}, ours / native", over("allocation", f"torch.empty+del {size}", "native"), 0.9)
        row(f"C++ alloc+free {size}, ours / native", over("allocation", f"C++ alloc+free {size}", "native"), 0.6)
    row("C++ 1,000 live blocks, ours / native", over("allocation", "C++ 1,000 live blocks", "native"), 0.6)
    for what in (" 1 KiB", " 1 MiB", ", 1,000 live blocks"):
        case = f"C++ 8 threads, 8 streams{what}"
        ratios = [over("allocation", case, mode) for mode in modes.MODES["allocation"] if mode not in ("ours", "bump")]
        row(f"8 threads on 8 streams{what}, ours / the best other", max((r for r in ratios if r is not None), default=None), 1.0)
    grown = ns("allocation", "growth 1 GiB")
    row("growth of 1 GiB, µs", None if grown is None else round(grown / 1e3, 1), 500)
    for section, large in (("handoff", "hand-off 1 GiB"), ("host-handoff", "hand-off 64 MiB")):
        big, small = ns(section, large), ns(section, "hand-off 1 MiB")
        row(f"{large} / 1 MiB, ours", round(big / small, 3) if big and small else None, 1.3)
    for what, value, most in replayed.targets(sections.get("replay", {})):
        row(what, value, most)
    return rows
