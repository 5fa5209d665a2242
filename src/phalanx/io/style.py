"""The style sheet of reports: light and dark according to the reader's system, and suitable for print."""

from __future__ import annotations

REPORT_CSS = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf7; --card: #ffffff; --ink: #22262e; --quiet: #5c6370; --line: #e3e0d9; --grid: #efece5;
  --s1: #2b6a99; --s2: #b0701c; --s3: #4a7d5c; --s4: #8a5a9c; --alarm: #b23a3a; --good: #3c7a52;
  --band: 0.16;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15171b; --card: #1c1f25; --ink: #e4e6ea; --quiet: #a0a7b4; --line: #30353f; --grid: #272b33;
    --s1: #6db1e0; --s2: #e0a458; --s3: #7fbf97; --s4: #c79ad9; --alarm: #ef8080; --good: #7cc596;
    --band: 0.22;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; font-weight: 650; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; font-weight: 650; margin: 44px 0 12px; }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 6px; color: var(--quiet); }
p { margin: 6px 0; }
.quiet, footer { color: var(--quiet); }
.lead { font-size: 16px; margin-top: 4px; }
.state { display: inline-block; padding: 1px 10px; border-radius: 99px; border: 1px solid var(--line);
  font-size: 13px; vertical-align: 4px; margin-left: 8px; }
.state.done { color: var(--good); border-color: var(--good); }
.state.failed, .state.interrupted { color: var(--alarm); border-color: var(--alarm); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin-top: 28px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.tile b { display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--quiet); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 14px 8px; }
figcaption { font-size: 13px; color: var(--quiet); margin-bottom: 4px; }
figcaption b { color: var(--ink); font-weight: 600; margin-right: 8px; }
.key { display: inline-block; width: 18px; height: 3px; border-radius: 2px; margin: 0 5px 3px 10px;
  vertical-align: middle; }
.key.s1 { background: var(--s1); } .key.s2 { background: var(--s2); } .key.s3 { background: var(--s3); }
.key.splanned { background: var(--quiet); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg.stack { height: 26px; border-radius: 6px; overflow: hidden; }
svg.cell { width: 160px; height: 10px; border-radius: 3px; overflow: hidden; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.tick { fill: var(--quiet); font-size: 11px; } .tick.y { text-anchor: end; } .tick.x { text-anchor: middle; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.line.s1 { stroke: var(--s1); } .line.s2 { stroke: var(--s2); } .line.s3 { stroke: var(--s3); }
.line.splanned { stroke: var(--quiet); stroke-dasharray: 5 4; stroke-width: 1.2; }
.band { opacity: var(--band); }
.band.s1 { fill: var(--s1); } .band.s2 { fill: var(--s2); } .band.s3 { fill: var(--s3); }
.dot.s1 { fill: var(--s1); } .dot.s2 { fill: var(--s2); } .dot.s3 { fill: var(--s3); }
.mark.incident { stroke: var(--alarm); stroke-width: 1.4; } .mark.checkpoint { stroke: var(--s3); stroke-width: 1.4; }
.part, .swatch { fill: #9aa1ab; }
.swatch { width: 11px; height: 11px; display: inline-block; border-radius: 3px; margin-right: 8px;
  vertical-align: -1px; }
.training-steps { fill: #3f8f63; } .waiting-for-slow-ranks { fill: #c98a35; } .waiting-for-data { fill: #d3b24a; }
.compiling { fill: #7d8fd1; }
.start-up { fill: #8fb0d6; } .checkpoints { fill: #5aa7a7; } .evaluation { fill: #8e7cc3; }
.integrity-checks { fill: #a38a6d; }
.failure-detection { fill: #d8776a; } .recovery { fill: #c25b6b; } .lost-work { fill: #b23a3a; }
.shutdown { fill: #9aa1ab; }
.unexplained { fill: #6f7682; } .compute { fill: var(--s1); } .wait { fill: var(--line); } .rest { fill: none; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; font-size: 13px; color: var(--quiet); }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th, td.n { white-space: nowrap; }
td { overflow-wrap: break-word; } td.long { overflow-wrap: anywhere; min-width: 16em; }
td.n, th.n { text-align: right; }
tr.alarm td { color: var(--alarm); }
.scroll { overflow-x: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 12px 14px; margin: 8px 0; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
footer { margin-top: 48px; font-size: 13px; }
@media (max-width: 520px) {
  .plots { grid-template-columns: 1fr; } .tiles { grid-template-columns: 1fr 1fr; } main { padding: 24px 14px; }
  td { white-space: nowrap; } td.long { white-space: normal; }
}
@media print {
  :root { --ground: #fff; --card: #fff; --ink: #000; --quiet: #444; --line: #ccc; --grid: #eee; }
  body { font-size: 12px; } main { max-width: none; padding: 0; }
  figure, .tile, tr, pre { break-inside: avoid; } h2 { break-after: avoid; }
}
"""
