"""Pictures of batch curves: a PNG, and one HTML page that needs no other file."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path

from lib.calibration import Curve, CurveKey, HostCalibration

STYLE = """body { font: 15px/1.45 system-ui, sans-serif; color: #222 }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
svg { width: 100%; height: auto } h1 { font-size: 1.3rem } table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem .2rem 0; text-align: right } td:first-child, th:first-child { text-align: left }
tr + tr { border-top: 1px solid #ddd } small { color: #666 }"""


def draw(
    hosts: Sequence[HostCalibration], published: Sequence[HostCalibration], key: CurveKey, folder: Path
) -> list[Path]:
    """Writes curves.png and curves.html into `folder`: measured curves solid, published ones dashed.

    A host is shown by its curve for `key`; one without is left out. Published figures name no model: their
    shape is to be compared, not their height.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [(one, curve) for one in hosts for curve in one.curves if curve.key == key]
    figure, (rates, memory) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, (one, curve) in enumerate(measured):
        sizes = [point.batch_size for point in curve.points]
        speeds = [point.pairs_per_second for point in curve.points]
        rates.plot(sizes, speeds, "o-", color=f"C{index}", label=one.machine.host)
        low = [p.batch_size / (p.seconds_median + p.seconds_spread / 2) for p in curve.points]
        high = [
            p.batch_size / max(p.seconds_median - p.seconds_spread / 2, 0.1 * p.seconds_median) for p in curve.points
        ]
        rates.fill_between(sizes, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
        peaks = [(point.peak_memory_bytes or 0) / 1e9 for point in curve.points]
        memory.plot(sizes, peaks, "o-", color=f"C{index}", label=one.machine.host)
        if curve.memory_limit_bytes and curve.memory_limit_bytes < 20e9 * max(peaks):
            memory.axhline(curve.memory_limit_bytes / 1e9, color=f"C{index}", linestyle=":", linewidth=1)
    for index, one in enumerate(published):
        points = one.curves[0].points
        style = {"color": f"C{len(measured) + index}", "linestyle": "--", "linewidth": 1.2}
        rates.plot(
            [p.batch_size for p in points],
            [p.pairs_per_second for p in points],
            **style,
            label=f"{one.machine.device_name}, published, other model",
        )
    rates.set_ylabel("pairs/s")
    memory.set_ylabel("peak memory, GB (dotted: limit)")
    for axis in (rates, memory):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("pairs a micro-batch")
        for scale in (
            axis.xaxis,
            axis.yaxis,
        ):  # plain numbers, on the few ticks between powers of ten as well
            scale.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.suptitle(str(key), fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "curves.png", folder / "curves.html"
    figure.savefig(picture, dpi=130)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    pyplot.close(figure)
    unfinished = page.with_suffix(".unfinished")
    unfinished.write_text(_page(_inline(text.getvalue()), measured, key), encoding="utf-8")
    unfinished.replace(page)
    return [picture, page]


def _inline(svg: str) -> str:
    """An SVG file as an element of a page, without the addresses of its namespaces."""
    return re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])


def _page(svg: str, measured: Sequence[tuple[HostCalibration, Curve]], key: CurveKey) -> str:
    rows = []
    for one, curve in measured:
        best = max(curve.points, key=lambda point: point.pairs_per_second)
        gflops = f"{one.gflops:,.0f}" if one.gflops else "-"
        cells = (
            one.machine.host,
            one.machine.device_name,
            gflops,
            str(best.batch_size),
            f"{best.pairs_per_second:.1f}",
            f"{curve.step_overhead_seconds * 1e3:.1f}",
            (curve.measured_at or "")[:10],
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(
        f"<th>{name}</th>"
        for name in ("host", "chip", "GFLOP/s", "best micro-batch", "pairs/s", "ms once a step", "measured")
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Batch curves</title><style>{STYLE}</style></head>
<body><h1>Batch curves: {html.escape(str(key))}</h1>
{svg}
<table><tr>{head}</tr>
{chr(10).join(rows)}
</table>
<small>Solid: measured. Dashed: published for the chip, of an unnamed model; compare shapes.</small>
</body></html>
"""
