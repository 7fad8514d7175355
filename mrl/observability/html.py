"""HTML of the report: style, scripts and building blocks. The page loads nothing from outside.

All text passes through `markup`, so model output is never interpreted as HTML.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256

from bokeh.resources import Resources

from mrl.observability.text_format import escape_html

STYLE = """
:root { color-scheme:light dark; --bg:#f6f7f9; --card:#fff; --ink:#1b2330; --soft:#667085; --line:#e3e7ee;
  --good:#0a7d4f; --bad:#c0352b; }
@media screen and (prefers-color-scheme:dark) {
  :root { --bg:#12151b; --card:#1b2029; --ink:#e6e9ef; --soft:#98a2b3; --line:#2c333f; --good:#4cc38a; --bad:#ff7b72 }
}
* { box-sizing:border-box }
body { margin:0; background:var(--bg); color:var(--ink);
  font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif }
main { max-width:1160px; margin:0 auto; padding:32px 24px 64px }
h1 { font-size:26px; line-height:1.2; margin:0 0 4px; overflow-wrap:anywhere }
h2 { font-size:18px; margin:40px 0 12px }
p.lead, p.hint { color:var(--soft); margin:0 0 8px }
p.hint { font-size:13px; margin-top:-8px }
p.warn { color:var(--bad); font-size:12px; margin:4px 0 0 }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(180px,1fr)); gap:12px; margin:20px 0 0 }
.card, figure, .box { background:var(--card); border:1px solid var(--line); border-radius:10px }
.card { padding:14px 16px }
.card b { display:block; font-size:25px; line-height:1.25; font-weight:650; font-variant-numeric:tabular-nums }
.card b small { color:var(--soft); font-weight:400; font-size:20px }
.card span, .card em { color:var(--soft); font-size:13px; font-style:normal; display:block }
.grid2, .grid3 { display:grid; gap:14px; align-items:start }
.grid2 { grid-template-columns:repeat(2,minmax(0,1fr)) }
.grid3 { grid-template-columns:repeat(3,minmax(0,1fr)) }
.grid2 + .grid2 { margin-top:14px }
figure { margin:0; padding:12px 12px 8px; position:relative; break-inside:avoid }
figcaption { font-weight:600; font-size:14px; padding-left:4px; overflow-wrap:anywhere }
.chart { min-height:230px }
.legend { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:12px; color:var(--soft); padding:2px 4px }
.legend i, .key { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:6px }
.box { overflow-x:auto }
table { border-collapse:collapse; width:100%; font-size:13.5px }
th { text-align:left; color:var(--soft); font-weight:500; font-size:12.5px }
th, td { padding:7px 12px; border-bottom:1px solid var(--line); vertical-align:top }
tr:last-child td { border-bottom:0 }
td.num, th.num { width:1%; text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
td.num + td.text, th.num + th:not(.num) { padding-left:36px }
td.when { width:1%; white-space:nowrap; color:var(--soft) }
td.text { font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace; white-space:pre-wrap;
  overflow-wrap:anywhere; min-width:90px }
td.text p { margin:0 }
td.text p.seen { color:var(--soft); padding-left:14px }
.good { color:var(--good) }
.poor { color:var(--bad) }
.share { display:flex; height:18px; border-radius:5px; overflow:hidden; margin:14px 12px 4px }
.share i { display:block; height:100% }
details summary { cursor:pointer; color:var(--soft); margin:32px 0 12px }
@media screen and (max-width:820px) { .grid2, .grid3 { grid-template-columns:minmax(0,1fr) } }
@media screen and (max-width:640px) {
  main { padding:20px 12px 48px }
  thead { display:none }
  tr { display:block; padding:6px 0; border-bottom:1px solid var(--line) }
  tr:last-child { border-bottom:0 }
  td, td.num, td.when { display:flex; justify-content:space-between; gap:16px; width:auto; padding:3px 12px; border:0;
    overflow-wrap:anywhere }
  td.num { text-align:right; white-space:normal }
  td.text { display:block }
  td:empty { display:none }
  td[data-head]::before { content:attr(data-head); color:var(--soft); font:12.5px/1.5 system-ui,sans-serif; flex:none }
  td.text[data-head]::before { display:block }
}
@media print {
  :root { --bg:#fff }
  body { font-size:12px }
  main { max-width:none; padding:0 }
  h2, p.hint { break-after:avoid }
  h2 { margin-top:24px }
  .box { overflow:visible }
  table { font-size:10px }
  th, td { padding:4px 6px }
  tr { break-inside:avoid }
  * { print-color-adjust:exact }
}
"""

SCRIPT = """
const watch = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
}, { rootMargin: '400px' });
function draw(chart) {
  watch.unobserve(chart);
  Bokeh.embed.embed_item(JSON.parse(chart.dataset.chart), chart);
  delete chart.dataset.chart;
}
for (const chart of document.querySelectorAll('[data-chart]')) watch.observe(chart);
addEventListener('beforeprint', () => document.querySelectorAll('[data-chart]').forEach(draw));
"""
"""Script that draws a chart when it scrolls near the window, so that a page with a hundred charts opens at once."""


def page(title: str, body: str) -> str:
    """Returns a complete document. Its content security policy allows only bokeh's and our script, and no requests.

    Args:
        title: Title of the page, plain text.
        body: HTML of the page.
    """
    scripts = (Resources(mode="inline", components=["bokeh"]).js_raw[0], SCRIPT)
    allowed = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape_html(title)}</title><style>{STYLE}</style></head>\n<body><main>{body}</main>"
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def header(title: str, lead: str, cards: Sequence[str]) -> str:
    """Returns the top of the page: title, a line below it, and the headline numbers."""
    words = f'<h1>{escape_html(title)}</h1><p class="lead">{escape_html(lead)}</p>'
    return f'<header>{words}<div class="cards">{"".join(cards)}</div></header>\n'


def section(title: str, body: str, hint: str = "") -> str:
    """Returns a heading with its content; "" where the content is empty."""
    if not body:
        return ""
    note = f'<p class="hint">{escape_html(hint)}</p>' if hint else ""
    return f"<section><h2>{escape_html(title)}</h2>{note}{body}</section>\n"


def grid(figures: Sequence[str], columns: int = 2) -> str:
    """Returns figures in columns; "" where all are empty."""
    body = "".join(figures)
    return f'<div class="grid{columns}">{body}</div>' if body else ""


def card(name: str, value: str, more: str = "", before: str = "") -> str:
    """Returns a headline number, with its earlier value and a line below."""
    start = f"<small>{escape_html(before)} → </small>" if before else ""
    below = f"<em>{escape_html(more)}</em>" if more else ""
    return f'<div class="card"><span>{escape_html(name)}</span><b>{start}{escape_html(value)}</b>{below}</div>'


def turns_cell(turns: Sequence[tuple[str, str]], more: str = "") -> str:
    """Returns a table cell of an episode, turn by turn.

    Args:
        turns: ("policy" or "environment", text) in order.
        more: Text after the last turn.
    """
    lines = "".join(
        f'<p class="{"seen" if by == "environment" else "said"}">{escape_html(text)}</p>' for by, text in turns
    )
    return f'<td class="text">{lines}{escape_html(more)}</td>'


def cell(text: str, kind: str = "") -> str:
    """Returns a table cell; kinds: "num", "text" (verbatim, monospaced), "when" (a time)."""
    return f'<td class="{kind}">{escape_html(text)}</td>' if kind else f"<td>{escape_html(text)}</td>"


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """Returns a table of rows of cells; "" without rows. A head that starts with ">" is right-aligned.

    Each cell also carries its column heading as an attribute; narrow screens show it next to the cell.
    """
    if not rows:
        return ""
    names = "".join(
        f'<th class="num">{escape_html(head[1:])}</th>' if head.startswith(">") else f"<th>{escape_html(head)}</th>"
        for head in heads
    )
    body = "".join(f"<tr>{_with_heads(row, heads)}</tr>" for row in rows)
    return f'<div class="box"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _with_heads(row: str, heads: Sequence[str]) -> str:
    """Returns a row whose cells have their table head as the attribute data-head; texts in cells are escaped."""
    before, *cells = row.split("<td")
    names = (escape_html(head.removeprefix(">")) for head in heads)
    labels = (f' data-head="{name}"' if name else "" for name in names)
    return before + "".join(f"<td{label}{rest}" for label, rest in zip(labels, cells, strict=True))
