"""Looks of the report page: one column, cards, light and dark by the reader's own setting."""

STYLE = """\
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --paper: #fbfaf7; --card: #ffffff; --line: #e3e0d8;
  --good: #0a7d5a; --bad: #b3401a; --track: #efece4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaee; --soft: #9aa4b2; --paper: #14171c; --card: #1c2027;
  --line: #2e343e; --good: #4fc79d; --bad: #ff8d5c; --track: #262b34; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2.25rem); line-height: 1.15; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .25rem; }
.kicker, .note { color: var(--soft); font-size: .875rem; margin: 0 0 .75rem; }
.kicker { text-transform: uppercase; letter-spacing: .06em; margin-bottom: .25rem; }
.verdict { font-size: 1.125rem; margin: 0 0 .5rem; max-width: 46rem; }
.saving { color: var(--good); font-weight: 600; margin: 0 0 1rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict.good, .verdict.bad { color: inherit; }
.meter { display: block; height: .6rem; margin-top: .5rem; border-radius: .3rem; background: var(--track);
  overflow: hidden; }
.meter span { display: block; height: 100%; background: var(--good); }
.bad .meter span { background: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .75rem 1.5rem;
  margin: 1.25rem 0 0; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .75rem; padding: 1.1rem 1.25rem;
  margin-top: 1.25rem; }
.bars { display: grid; gap: .5rem; }
.bar { display: grid; grid-template-columns: minmax(7rem, 11rem) 1fr 6.5rem; gap: .75rem; align-items: center; }
.label { overflow-wrap: anywhere; font-size: .9rem; }
.track { display: flex; height: 1.4rem; background: var(--track); border-radius: .25rem; overflow: hidden; }
.track i { display: block; flex: none; }
.total { text-align: right; font-variant-numeric: tabular-nums; font-size: .9rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .9rem 0 0; padding: 0;
  font-size: .85rem; color: var(--soft); }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin-right: .35rem;
  vertical-align: -.08rem; }
.areas { display: block; width: 100%; height: 15rem; background: var(--track); border-radius: .25rem; }
.peak { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 4; vector-effect: non-scaling-stroke; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: .8rem; margin-top: .25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: .8rem; }
th, td { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.sum td { font-weight: 600; }
tbody tr:last-child td { border-bottom: 0; }
code { font: .85em ui-monospace, "SFMono-Regular", "DejaVu Sans Mono", monospace; white-space: nowrap; }
section ul:not(.legend) { margin: .25rem 0 0; padding-left: 1.1rem; }
@media (max-width: 40rem) {
  main { padding: 1.25rem .9rem 3rem; } section { padding: .9rem; }
  .bar { grid-template-columns: 1fr auto; gap: .15rem .5rem; } .track { grid-row: 2; grid-column: 1 / -1; }
}
"""
