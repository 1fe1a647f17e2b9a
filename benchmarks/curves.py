"""Pictures of batch curves: a PNG, and one HTML page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from lib.plan.calibration import BatchCurve, CurveKey, HostCalibration
from lib.report import pictures

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
    measured = [(one, curve) for one in hosts for curve in one.curves if curve.key == key]
    figure = pictures.batch_curves_figure(
        [(one.machine.host, curve) for one, curve in measured],
        [(f"{one.machine.device_name}, published, other model", one.curves[0]) for one in published],
    )
    figure.suptitle(str(key), fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "curves.png", folder / "curves.html"
    figure.savefig(picture, dpi=130)
    unfinished = page.with_suffix(".unfinished")
    unfinished.write_text(_page(pictures.svg_of(figure), measured, key), encoding="utf-8")
    unfinished.replace(page)
    return [picture, page]


def _page(svg: str, measured: Sequence[tuple[HostCalibration, BatchCurve]], key: CurveKey) -> str:
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
