"""A `StepPlan` as one HTML page that shows where the bytes are; it loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from wusharding.analysis.findings import Finding
from wusharding.analysis.plan import LeafPlan, bytes_text
from wusharding.analysis.step_plan import StepPlan
from wusharding.analysis.times import Flow, Times, flows, seconds_text

_MAX_BARS = 24

_STYLE = """
:root { color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --text: #1d1f21; --soft: #62676d; --line: #e2e2dd;
  --before: #b9bec5; --after: #2563c9; --good: #1b7f4b; --warn: #b45309; }
@media (prefers-color-scheme: dark) { :root {
  --page: #16181b; --card: #1f2226; --text: #e8e8e6; --soft: #a0a6ad; --line: #34383d;
  --before: #5d646c; --after: #6ea1f2; --good: #5cc08c; --warn: #e5a04b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 4px; }
p { margin: 4px 0; } .soft { color: var(--soft); }
.mono { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px;
  margin-top: 20px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 14px 16px; } .tile b { display: block; font-size: 24px; font-weight: 650; }
.card { padding: 6px 16px; margin-top: 10px; }
.finding { padding: 12px 16px; border-left: 4px solid var(--warn); }
.finding.mended { border-left-color: var(--good); }
.finding header { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline; }
.finding header b { font-weight: 650; } .pill { color: var(--warn); font-size: 13px; }
.mended .pill { color: var(--good); } .finding .cost { margin-left: auto; white-space: nowrap; }
.row { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 6fr) 150px; gap: 16px;
  align-items: center; padding: 7px 0; border-top: 1px solid var(--line); }
.row:first-child { border-top: 0; } .row small { display: block; color: var(--soft); }
.bar { height: 9px; border-radius: 0 3px 3px 0; min-width: 2px; margin: 2px 0; }
.before { background: var(--before); } .after { background: var(--after); }
.numbers { text-align: right; font-variant-numeric: tabular-nums; font-size: 13px; }
.numbers span { display: block; } .key { display: flex; gap: 18px; margin: 6px 0; font-size: 13px; }
.key i { display: inline-block; width: 22px; height: 9px; border-radius: 3px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
td, th { text-align: left; padding: 5px 12px 5px 0; border-top: 1px solid var(--line);
  vertical-align: top; } thead th { border-top: 0; color: var(--soft); font-weight: 500; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; }
@media (max-width: 640px) { .row { grid-template-columns: minmax(0, 1fr); gap: 4px; }
  .numbers { text-align: left; } .numbers span { display: inline; margin-right: 12px; }
  .finding .cost { margin-left: 0; white-space: normal; } }
"""


def html_page(plan: StepPlan, times: Times | None = None, *, title: str = "train step") -> str:
    """The page.

    Args:
      plan: of a step.
      times: estimated for it, or None.
      title: what the step is called.

    Returns:
      A whole HTML document, without scripts, and without anything to load.
    """
    sent = tuple(sum(f.sent_bytes for f in flows(r, plan)) for r in (plan.before, plan.traffic))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Weight update sharded {plan.num_shards} ways over '
        f"{escape(', '.join(plan.axes))}; {plan.update_ops[1]} of {plan.update_ops[0]} operations "
        "of the update on shards.</p>",
        _tiles(plan, sent, times),
        _findings(plan.findings),
        _collectives(plan),
        _arrays(plan),
        _whole(plan),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: where the bytes are</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _tiles(plan: StepPlan, sent: Sequence[int], times: Times | None) -> str:
    weights = plan.weight_bytes
    tiles = [
        ("State on each device", bytes_text(plan.held_bytes), bytes_text(plan.state_bytes)),
        ("Weights on each device, between steps", bytes_text(weights[1]), bytes_text(weights[0])),
        ("Sent by each device in a step", bytes_text(sent[1]), bytes_text(sent[0])),
    ]
    if times is not None:
        before, after = times.total
        name = f"Collectives and update, estimated on {times.network}"
        tiles.append((name, seconds_text(after), seconds_text(before)))
    cells = (
        f'<div class="tile"><span class="soft">{escape(name)}</span><b>{now}</b>'
        f'<span class="soft">as written {was}</span></div>'
        for name, now, was in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _findings(findings: Sequence[Finding]) -> str:
    cards = []
    for f in findings:
        pill = "mended by the sharded step" if f.mended else "to be mended by you"
        cards.append(
            f'<div class="card finding{" mended" if f.mended else ""}"><header>'
            f'<b class="mono">{escape(f.code)}</b><span class="pill">{pill}</span>'
            f'<span class="cost">{escape(f.cost)}</span></header>'
            f'<p>{escape(f.what)}</p><p class="mono soft">{escape(f.where)}</p>'
            f"<p>{escape(f.remedy)}</p></div>"
        )
    return "<h2>Findings</h2>" + ("".join(cards) or '<p class="soft">None.</p>')


_KEY = (
    '<div class="key"><span><i class="before"></i>as written</span>'
    '<span><i class="after"></i>sharded step</span></div>'
)


def _arrays(plan: StepPlan) -> str:
    rows = [("weight", leaf) for leaf in plan.weight_rows()]
    rows += [("state", leaf) for leaf in plan.state]
    rows.sort(key=lambda row: -row[1].logical_bytes)
    shown, rest = rows[:_MAX_BARS], rows[_MAX_BARS:]
    most = max((leaf.logical_bytes for _, leaf in rows), default=0)
    totals = (
        ("All weights", plan.weight_bytes),
        ("All state", (plan.state_bytes, plan.held_bytes)),
    )
    sums = [_row(name, "", sizes, max(max(t) for _, t in totals)) for name, sizes in totals]
    bars = [
        _row(
            leaf.path,
            f"{role}, {leaf.dtype}{list(leaf.shape)}, {leaf.format}"
            + (f"; {leaf.why}" if leaf.why else ""),
            (leaf.logical_bytes, leaf.held_bytes),
            most,
        )
        for role, leaf in shown
    ]
    if rest:
        sizes = (sum(r.logical_bytes for _, r in rest), sum(r.held_bytes for _, r in rest))
        bars.append(_row(f"{len(rest)} smaller arrays", "together, without a bar", sizes, 0))
    table = _table(
        ("array", "role", "type", "format", "as written", "sharded", "why whole"),
        (
            (
                leaf.path,
                role,
                f"{leaf.dtype}{list(leaf.shape)}",
                leaf.format,
                bytes_text(leaf.logical_bytes),
                bytes_text(leaf.held_bytes),
                leaf.why,
            )
            for role, leaf in rows
        ),
        numbers=(4, 5),
    )
    return (
        "<h2>Arrays</h2>"
        '<p class="soft">Bytes on each device between steps, largest arrays first. [0] is the '
        "step's first argument. The format of a weight is that of its update.</p>"
        f'{_KEY}<div class="card">{"".join(sums)}</div><div class="card">{"".join(bars)}</div>'
        f"<details><summary>All {len(rows)} arrays as a table</summary>{table}</details>"
    )


def _row(name: str, note: str, sizes: tuple[int, int], most: int) -> str:
    bars = "".join(
        f'<div class="bar {kind}" style="width:{100 * size / most:.2f}%"></div>'
        for kind, size in zip(("before", "after"), sizes, strict=True)
        if size and most
    )
    before, after = map(bytes_text, sizes)
    return (
        f'<div class="row"><div><span class="mono">{escape(name or "(root)")}</span>'
        f"<small>{escape(note)}</small></div><div>{bars}</div>"
        f'<div class="numbers"><span class="soft">{before}</span><span>{after}</span></div></div>'
    )


def _collectives(plan: StepPlan) -> str:
    before, after = flows(plan.before, plan), flows(plan.traffic, plan)
    most = max((f.sent_bytes for f in (*before, *after)), default=0)
    rows = [_flow_row(f, most, (f.sent_bytes, 0)) for f in before]
    rows += [_flow_row(f, most, (0, f.sent_bytes)) for f in after]
    return (
        "<h2>Collectives</h2>"
        '<p class="soft">Bytes that each device sends in a step, as on a ring. An all-reduce sends '
        "what a reduce-scatter and an all-gather send together.</p>"
        f'{_KEY}<div class="card">{"".join(rows) or "<p>None.</p>"}</div>'
    )


def _flow_row(flow: Flow, most: int, sizes: tuple[int, int]) -> str:
    row = _row(
        f"{flow.count} {flow.kind}",
        f"{flow.purpose}; {bytes_text(flow.whole_bytes)} whole, among {flow.members}",
        sizes,
        most,
    )
    return row.replace("<span>0 B</span>", "").replace('<span class="soft">0 B</span>', "")


def _whole(plan: StepPlan) -> str:
    leaves: list[LeafPlan] = [leaf for leaf in (*plan.weights, *plan.state) if leaf.why]
    kept = _table(
        ("array", "bytes", "why"),
        ((leaf.path, bytes_text(leaf.held_bytes), leaf.why) for leaf in leaves),
        numbers=(1,),
    )
    gathered = _table(
        ("operation", "bytes", "why", "line"),
        ((p.primitive, bytes_text(p.moved_bytes), p.why, p.source) for p in plan.whole),
        numbers=(1,),
    )
    return (
        f'<h2>What stays whole</h2><div class="card">{kept}</div>'
        f"<h2>Gathered, because an operation could not run on the pieces</h2>"
        f'<div class="card">{gathered}</div>'
    )


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        plain, right = f"<{tag}>", f'<{tag} class="n">'
        return "".join(
            f"{right if i in numbers else plain}{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    if not body:
        return '<p class="soft">Nothing.</p>'
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", heads)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
