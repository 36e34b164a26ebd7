"""Plots of a comparison: SVG always, by hand; PNG where matplotlib is."""

import html
import math
import re

from .report import TITLES, time

COLOURS = ["#0b6e4f", "#c44536", "#3d5a80", "#e0a030", "#7b5ea7", "#5c946e", "#9a6324", "#777777"]
_BAR, _GAP, _PLOT, _LEFT, _TOP = 15, 22, 300, 78, 66


def order(found):
    """The modes of a section, ours first, as they were measured."""
    seen = dict.fromkeys(mode for row in found["cases"].values() for mode in row)
    return sorted(seen, key=lambda mode: mode != "ours")


def svg(section, found):
    """One section as bars on a logarithmic scale, a group for each case; the whiskers are the quartiles."""
    modes, cases = order(found), found["cases"]
    values = [cell["ns"][key] for row in cases.values() for cell in row.values() for key in ("q1", "median", "q3")]
    if not values:
        return None
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    y = lambda ns: _TOP + _PLOT * (high - math.log10(max(ns, 10**low))) / (high - low)  # noqa: E731
    widths = [max(len(row) * _BAR, 8 * longest(case)) + _GAP for case, row in cases.items()]
    width = max(_LEFT + sum(widths) + 20, _LEFT + 20 + sum(30 + 7.5 * len(mode) for mode in modes))
    height = _TOP + _PLOT + 62
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="16" font-weight="600">{esc(TITLES.get(section, section))}</text>',
    ]
    x = _LEFT
    for n, mode in enumerate(modes):
        out.append(f'<rect x="{x:.0f}" y="38" width="11" height="11" fill="{colour(n)}"/><text x="{x + 16:.0f}" y="48">{esc(mode)}</text>')
        x += 30 + 7.5 * len(mode)
    for power in range(low, high + 1):
        at = y(10**power)
        out.append(f'<line x1="{_LEFT}" x2="{width - 12:.0f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#555555">{esc(time(10**power))}</text>')
    left = _LEFT + _GAP / 2
    for (case, row), room in zip(cases.items(), widths):
        start = left + (room - _GAP - len(row) * _BAR) / 2
        for number, mode in enumerate(mode for mode in modes if mode in row):
            ns = row[mode]["ns"]
            out += bar(start + number * _BAR, y, ns, colour(modes.index(mode)), f"{case}, {mode}: {describe(row[mode])}", 10**low)
        middle = left + (room - _GAP) / 2
        for number, words in enumerate(wrapped(case)):
            out.append(f'<text x="{middle:.1f}" y="{_TOP + _PLOT + 18 + 15 * number}" text-anchor="middle">{esc(words)}</text>')
        left += room
    return "\n".join([*out, "</svg>", ""])


def bar(x, y, ns, fill, title, floor):
    """A bar with its whisker; the title shows where a pointer rests."""
    top, bottom = y(ns["median"]), y(floor)
    middle = x + (_BAR - 3) / 2
    return [
        f'<g><title>{esc(title)}</title><rect x="{x:.1f}" y="{top:.1f}" width="{_BAR - 3}" height="{max(bottom - top, 1):.1f}" fill="{fill}"/>'
        f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y(ns["q3"]):.1f}" y2="{y(ns["q1"]):.1f}" stroke="#111111"/></g>'
    ]


def describe(cell):
    """A figure in words."""
    ns, ratio = cell["ns"], cell.get("ours_over")
    text = f"{time(ns['median'])} ({time(ns['q1'])} to {time(ns['q3'])}, {ns['n']} slices)"
    return text + (f"; ours / this: {ratio['median']:.3g}" if ratio else "")


def wrapped(case):
    """A case's name in at most three short lines; a number stays with its unit."""
    lines = [""]
    for word in re.sub(r"(\d) (?=[KMGT]iB)", "\\1\u00a0", case).split(" "):
        if lines[-1] and len(lines[-1]) + len(word) > 13 and len(lines) < 3:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def longest(case):
    return max(len(line) for line in wrapped(case))


def colour(n):
    return COLOURS[n % len(COLOURS)]


def esc(text):
    return html.escape(str(text), quote=True)


def png(section, found, path):
    """The same by matplotlib, into a file. Why it was not written, or None."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "needs matplotlib: pip install matplotlib"
    modes, cases = order(found), found["cases"]
    figure, axes = pyplot.subplots(figsize=(max(8, 1.1 * len(cases) + 3), 5))
    share = 0.84 / max(1, len(modes))
    for n, mode in enumerate(modes):
        places = [i for i, row in enumerate(cases.values()) if mode in row]
        cells = [row[mode]["ns"] for row in cases.values() if mode in row]
        heights = [cell["median"] / 1e3 for cell in cells]
        around = [
            [max(0.0, (cell["median"] - cell["q1"]) / 1e3) for cell in cells],
            [max(0.0, (cell["q3"] - cell["median"]) / 1e3) for cell in cells],
        ]
        at = [i - 0.42 + share * (n + 0.5) for i in places]
        axes.bar(at, heights, share * 0.9, yerr=around, color=colour(n), label=mode, error_kw={"lw": 1})
    axes.set_yscale("log")
    axes.set_ylabel("µs an operation")
    axes.set_xticks(range(len(cases)), ["\n".join(wrapped(case)) for case in cases], fontsize=8)
    axes.set_title(TITLES.get(section, section))
    axes.legend(fontsize=8, ncol=4)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None
