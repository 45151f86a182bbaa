"""The HTML of the page, of a section and of a table, and the style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def figure(title: str, reading: str, content: str, kind: str = "") -> str:
    """Make a section with a title and a sentence that explains its content.

    Args:
        title: The title.
        reading: How to read the content; "": nothing is said.
        content: The HTML of the content.
        kind: Further classes of the section.

    Returns:
        The HTML of the section.
    """
    return (
        f'<section class="panel {kind}"><h2>{escape(title)}</h2>'
        + (f'<p class="reading">{escape(reading)}</p>' if reading else "")
        + f"{content}</section>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Make a table in a frame that scrolls if the table is too wide.

    Args:
        head: The texts of the header.
        rows: The texts of the rows. They are escaped here.
        kind: Further classes of the frame.

    Returns:
        The HTML of the table.
    """
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll {kind}" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# With this policy the browser loads nothing and runs no script, whatever a record holds.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:">
<title>{title} · fishleg report</title>
<style>{style}</style>
</head>
<body>
<header><p class="brand">fishleg · pruning report</p><h1>{title}</h1><ul class="facts">{facts}</ul></header>
<main>
{body}
</main>
<footer><p>Written by fishleg{version}. This page needs no other files.</p></footer>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; --bg: #f5f6f8; --surface: #fff; --ink: #17202b; --muted: #56616f;
  --rule: #dde2e8; --track: #e9edf1; --c1: #0a62a9; --c2: #b35900; --c3: #8a2f86; --healthy: #56616f1f;
  --good: #0a62a9; --bad: #a83a12; --note: #fff6e0; --note-edge: #d99a00; --fail: #fdece6;
  --fail-edge: #c8451a;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media screen and (prefers-color-scheme: dark) { :root { --bg: #11151b; --surface: #1a2028; --ink: #e7ebf0;
  --muted: #a0acb9; --rule: #313a45; --track: #2a323c; --c1: #62b0ee; --c2: #f2a24e; --c3: #df8fdb;
  --healthy: #a0acb926; --good: #62b0ee; --bad: #ff9c78; --note: #2e2714; --note-edge: #d9a520;
  --fail: #35201a; --fail-edge: #ff8458; } }
*, ::before, ::after { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); line-height: 1.5; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  -webkit-text-size-adjust: 100%; }
header, main, footer { max-width: 1180px; margin: 0 auto; padding: 0 32px; }
header { padding-top: 40px; padding-bottom: 24px; }
footer { padding-top: 8px; padding-bottom: 40px; color: var(--muted); font-size: .85rem; }
h1, h2, p, ul, dl, pre { margin: 0; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; line-height: 1.3; letter-spacing: -.005em; }
.brand { color: var(--muted); font-size: .85rem; margin-bottom: 6px; }
.facts { list-style: none; padding: 0; margin-top: 10px; display: flex; flex-wrap: wrap; gap: 2px 22px;
  color: var(--muted); font-size: .92rem; }
.cards { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
.card, .panel, .banner { background: var(--surface); border: 1px solid var(--rule); border-radius: 12px; }
.card { padding: 18px 20px; }
.card h2 { font-size: .88rem; font-weight: 500; color: var(--muted); letter-spacing: 0; }
.card p { font-size: .88rem; color: var(--muted); }
.card p + p { margin-top: 2px; }
.card .value { font-size: 1.7rem; font-weight: 650; line-height: 1.25; margin: 4px 0 6px; color: var(--ink);
  letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.card .from { color: var(--muted); font-weight: 450; font-size: 1.15rem; white-space: nowrap; }
.card .to { white-space: nowrap; }
.card .better { color: var(--good); font-weight: 600; } .card .worse { color: var(--bad); font-weight: 600; }
main > * { margin-bottom: 20px; }
.banner { padding: 16px 20px; border-left-width: 5px; overflow-wrap: anywhere; }
.banner h2 { font-size: 1rem; margin-bottom: 4px; } .banner ul { padding-left: 1.2em; }
.note { background: var(--note); border-color: var(--note-edge); }
.bad { background: var(--fail); border-color: var(--fail-edge); }
.panel { padding: 24px; min-width: 0; }
.pair { display: flex; flex-wrap: wrap; gap: 20px; } .pair > * { flex: 1 1 460px; }
.reading { color: var(--muted); font-size: .92rem; margin: 4px 0 14px; max-width: 76ch; }
.beside { display: flex; flex-wrap: wrap; gap: 24px 36px; align-items: flex-start; }
.beside > :first-child { flex: 6 1 560px; min-width: 0; } .beside > .numbers { flex: 1 1 300px; }
.key { list-style: none; padding: 0; margin-bottom: 10px; display: flex; flex-wrap: wrap; gap: 4px 18px;
  font-size: .86rem; } .key li { display: flex; align-items: center; gap: 7px; }
svg { display: block; } .chart { width: 100%; height: auto; max-width: 760px; margin: 0 auto; }
.narrow { display: none; } .wide + .narrow + .wide { margin-top: 10px; }
.chart text { font-size: 12.5px; fill: var(--muted); font-variant-numeric: tabular-nums; }
.chart .label { fill: var(--ink); } .chart .small { font-size: 11.5px; }
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); } .muted { color: var(--muted); }
.grid { stroke: var(--rule); fill: none; vector-effect: non-scaling-stroke; }
.axis, .tick { stroke: var(--muted); fill: none; }
.divider { stroke: var(--muted); stroke-opacity: .45; stroke-dasharray: 2 4; fill: none; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.dash { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-dasharray: 6 5; }
.area { fill: currentColor; fill-opacity: .2; } .healthy { fill: var(--healthy); }
.solid { fill: currentColor; stroke: var(--surface); stroke-width: 1.2; }
.open { fill: var(--surface); stroke: currentColor; stroke-width: 2; }
.ring { fill: none; stroke: currentColor; stroke-width: 2; pointer-events: all; }
.stroke { fill: none; stroke: currentColor; stroke-width: 2.6; stroke-linecap: round; pointer-events: all; }
.hover { fill: currentColor; fill-opacity: 0; } .hover:hover, .mark:hover .open { fill-opacity: .6; }
.scroll { overflow: auto; max-width: 100%; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; } thead th { color: var(--muted); font-size: .84rem; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule); }
tr > :last-child { padding-right: 0; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--surface); vertical-align: bottom; z-index: 1; }
.numbers { max-height: 430px; } .numbers td, .numbers th { text-align: right; white-space: nowrap; }
.numbers tr > :first-child { text-align: left; }
.amount { text-align: right; white-space: nowrap; } .share { width: 1%; }
.strip { width: 100%; height: 13px; min-width: 60px; } .strip path { vector-effect: non-scaling-stroke; }
.track { fill: var(--track); } .fill { fill: var(--c1); }
.reference { stroke: var(--ink); stroke-opacity: .55; }
.whisker { stroke: currentColor; stroke-width: 1.5; } .box { fill: currentColor; fill-opacity: .4; }
.median { stroke: currentColor; stroke-width: 2.5; }
.layers table { table-layout: fixed; min-width: 640px; } .layers.long { max-height: 660px; }
.layers tbody > tr > * { padding-top: 3px; padding-bottom: 3px; }
.layers thead .name { width: 29%; } .layers tbody th { overflow-wrap: anywhere; line-height: 1.3; }
.layers small { color: var(--muted); font-weight: 400; margin-left: 6px; display: inline-block; }
.layers thead .size, .layers thead .macs { width: 74px; text-align: right; }
.layers thead .share { width: 76px; position: sticky; top: 0; background: var(--surface); }
.layers .picture, .layers .reason { padding-left: 12px; } .layers .saliency { padding-left: 24px; }
.layers .reason { color: var(--muted); font-style: italic; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.ruler { display: block; position: relative; height: 1.3em; font-size: .78rem; font-weight: 400; }
.ruler i { position: absolute; font-style: normal; transform: translateX(-50%); white-space: nowrap; }
.ruler .first { transform: none; } .ruler .last { transform: translateX(-100%); }
.timing th { width: 1%; text-transform: capitalize; } .timing td.amount { width: 1%; }
.timing tr > * { border: 0; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 220px), 1fr)); gap: 12px 24px;
  margin-top: 12px; } dt { color: var(--muted); font-size: .84rem; }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; } summary h2 { display: inline; }
pre { font: .85rem/1.55 var(--mono); background: var(--bg); border-radius: 8px; padding: 14px 16px;
  margin-top: 12px; overflow: auto; max-width: 100%; tab-size: 4; }
.steps { padding-left: 1.3em; margin-top: 8px; } .steps li { margin-bottom: 14px; padding-left: 4px; }
.steps li::marker { color: var(--muted); font-size: .92rem; }
.steps h3 { margin: 0; font-size: .95rem; font-weight: 600; }
.steps pre { margin-top: 6px; padding: 10px 14px; }
code { font-family: var(--mono); font-size: .9em; }
.panel .banner { margin: 8px 0 14px; padding: 12px 16px; } .panel .banner p + p { margin-top: 4px; }
.panel > p + .key { margin-top: 10px; }
.banner pre { white-space: pre-wrap; margin: 8px 0; }
:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; }
@media (max-width: 640px) {
  header, main, footer { padding-left: 16px; padding-right: 16px; } header { padding-top: 24px; }
  h1 { font-size: 1.5rem; } .panel { padding: 18px 16px; } main > * { margin-bottom: 14px; }
  .wide { display: none; } .narrow { display: block; } .pair { gap: 14px; } .cards { gap: 10px; }
  .beside > :first-child, .beside > .numbers, .pair > * { flex: 1 1 100%; }
  .timing tr > * { padding-right: 7px; } .timing .strip { min-width: 20px; }
  .layers .reason { white-space: normal; }
  .card { padding: 14px 16px; } .card .value { font-size: 1.5rem; }
  .layers table { min-width: 0; display: block; } .layers thead, .layers tbody { display: block; }
  .layers tr { display: grid; grid-template-columns: 1fr 84px 1fr; align-items: center; padding: 5px 0;
    border-bottom: 1px solid var(--rule); }
  .layers thead { position: sticky; top: 0; background: var(--surface); z-index: 1; }
  .layers thead th, .layers thead td { position: static !important; }
  .layers tr > * { border: 0; padding: 1px 0 !important; }
  .layers .size, .layers .macs, .layers thead .name { display: none; }
  .layers tbody th, .layers .reason { grid-column: 1 / -1; } .layers .share { width: auto !important; }
  .layers .share { padding-right: 14px !important; } .saliency .ruler i:nth-child(even) { display: none; }
}
@media print {
  body { background: #fff; font-size: 11pt; }
  header, main, footer { max-width: none; padding-left: 0; padding-right: 0; }
  .card, .banner, .panel, .chart, tr { break-inside: avoid; } h2, .reading { break-after: avoid; }
  .panel:has(.layers), .panel:has(pre) { break-inside: auto; } .pair { display: block; }
  .pair > * + * { margin-top: 20px; }
  .scroll, .layers.long, .numbers { overflow: visible; max-height: none; } thead th { position: static; }
  pre { white-space: pre-wrap; } .fill, .track, .healthy, .box { print-color-adjust: exact; }
}
"""
