"""A recorded run as one HTML document that loads nothing and runs no script."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from html import escape

from outrider import trace_report
from outrider.assets import content_policy, page
from outrider.trace import Origin
from outrider.trace_charts import acceptance_chart, timeline
from outrider.trace_file import RecordedOutput, RecordedRound, RecordedRun

_MOST_AHEAD = 6  # positions that have a shade of their own
_MARKS = {Origin.CORRECTED: "×", Origin.BONUS: "+"}
_WHO = {
    Origin.PLAIN: "the target's own, nothing was guessed",
    Origin.CORRECTED: "the target's own, in place of a refused guess",
    Origin.BONUS: "the target's own, after guesses that were all right",
}
_PHASES_KNOWN = (
    "Wall times of a CPU. Verify is the target pass and the decision; a commit takes little and is "
    "drawn at least one pixel wide; between two rounds the host detokenises and plans. Others: "
    "sequences that shared the pass."
)
_PHASES_UNKNOWN = (
    "On a GPU a round runs while the host is elsewhere, mostly as one graph, so that only its "
    "whole duration is known, measured on the device; it is placed by when the host saw its "
    "results. Others: sequences that shared it."
)


def report(run: RecordedRun) -> str:
    """The document."""
    template = page("report.html")
    content = "\n".join(_content(run))
    policy = escape(content_policy(template), quote=True)
    return string.Template(template).substitute(
        policy=policy, title=escape(f"{run.model}: a recorded run"), content=content
    )


def visible(text: str) -> str:
    """A text on one line, what cannot be seen spelled out."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _content(run: RecordedRun) -> Iterator[str]:
    rounds = trace_report.all_rounds(run)
    yield _header(run)
    yield _panel("This run", _totals(run, rounds))
    entries = trace_report.acceptance(rounds)
    shares = acceptance_chart(entries) + _acceptance_table(entries)
    shares += (
        '<p class="note">Share of the rounds that verified a draft at a position in which it and '
        "all before it were accepted, with Wilson's 95 % intervals, which take rounds as "
        "independent.</p>"
    )
    if not entries:
        shares = '<p class="quiet">Nothing was drafted.</p>'
    reasons = trace_report.stop_counts(run.outputs)
    stops = _table(
        ("Stopped by", "Rounds", "Share"),
        [
            (escape(reason), str(count), f"{count / len(rounds):.1%}")
            for reason, count in reasons.items()
        ],
        "stops",
    )
    yield (
        f'<div class="two">{_panel("Acceptance by position", shares)}'
        f"{_panel('Why rounds stopped', stops)}</div>"
    )
    yield _panel("Legend", _LEGEND)
    for number, output in enumerate(run.outputs, start=1):
        yield _output(run, number, output)


def _header(run: RecordedRun) -> str:
    how = "no drafts"
    if run.method is not None:
        how = f"{run.method}, up to {run.num_draft_tokens} drafts a round"
    return (
        f"<header><h1>{escape(run.model)}</h1>"
        f'<p class="quiet">a recorded run: {escape(how)}, on {escape(run.device)}</p></header>'
    )


def _panel(heading: str, content: str) -> str:
    return f'<section class="panel"><h2>{escape(heading)}</h2>{content}</section>'


def _totals(run: RecordedRun, rounds: Sequence[RecordedRound]) -> str:
    num_drafted = sum(len(one.drafts) for one in rounds)
    length = trace_report.acceptance_length(rounds)
    end = max((one.started + one.seconds for one in rounds), default=0.0)
    entries = {
        "Outputs": str(len(run.outputs)),
        "Tokens": str(sum(len(one.tokens) for one in rounds)),
        "Target passes": str(len(rounds)),
        "Tokens a round": "–" if length is None else f"{length:.2f}",
        "Drafts accepted": f"{sum(one.accepted for one in rounds)} of {num_drafted}",
        "From first pass to last": f"{end:.3f} s",
    }
    pairs = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in entries.items())
    return f'<dl id="totals">{"".join(pairs)}</dl>'


def _acceptance_table(entries: Sequence[trace_report.Acceptance]) -> str:
    rows = [
        (
            str(entry.position),
            str(entry.rounds),
            str(entry.accepted),
            f"{entry.share:.1%}",
            f"{entry.low:.1%} to {entry.high:.1%}",
        )
        for entry in entries
    ]
    heads = ("Position", "Rounds", "Accepted", "Share", "95 % interval")
    return _table(heads, rows, "acceptance")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    """Cells are markup already."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    mark = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll"><table{mark}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_LEGEND = f"""<div class="legend">
{page("legend.html")}<span><span class="rejected">refused</span> guesses that are no part of the
text</span></div>
<p class="switches"><label><input type="checkbox" id="guesses" checked> Show refused guesses</label>
<label><input type="checkbox" id="positions"> Show positions</label></p>"""


def _output(run: RecordedRun, number: int, output: RecordedOutput) -> str:
    heading = f"Output {number}: prompt {output.prompt_index + 1}"
    if any(other.output_index for other in run.outputs):
        heading += f", its text {output.output_index + 1}"
    ending = trace_report.ENDINGS[output.finish_reason]
    length = trace_report.acceptance_length(output.rounds)
    told = f"{sum(len(one.tokens) for one in output.rounds)} tokens, {len(output.rounds)} passes"
    if length is not None:
        told += f", {length:.2f} tokens a round"
    transcript = "".join(_transcript(output))
    known = all(one.parts is not None for one in output.rounds)
    rows = [_round_row(n, one, output) for n, one in enumerate(output.rounds, start=1)]
    times = ("Verify ms", "Commit ms", "Draft ms") if known else ()
    heads = ("Round", "Start s", "Took ms", *times, "Accepted", "Text", "Stopped by", "Others")
    table = _table(heads, [row if known else row[:3] + row[6:] for row in rows])
    return (
        f'<section class="panel output"><h2>{escape(heading)}</h2>'
        f'<p class="quiet">{escape(f"{told}, ended by: {ending}")}</p>'
        f'<div class="transcript"><span class="prompt">{escape(output.prompt)}</span>'
        f"{transcript}</div>"
        f"<h3>When the rounds ran</h3>{timeline(output.rounds)}"
        f'<p class="note">{_PHASES_KNOWN if known else _PHASES_UNKNOWN}</p>'
        f'<details open class="rounds"><summary>Rounds one by one</summary>{table}</details>'
        "</section>"
    )


def _transcript(output: RecordedOutput) -> Iterator[str]:
    number = 0
    for one in output.rounds:
        for token, chosen in zip(one.tokens, one.trace.origins, strict=True):
            number += 1
            origin, position = chosen.origin, chosen.position
            if origin is Origin.CORRECTED:
                for guess in one.rejected:
                    shown = escape(_on_one_line(guess))
                    yield f'<del class="rejected" title="refused guess">{shown}</del>'
            who = _WHO.get(origin, f"drafted at position {position}, accepted")
            title = f"{visible(token.text)}, token {number}, id {token.id}: {who}"
            classes = f"token {origin.value}{'' if token.text else ' empty'}"
            ahead = "" if position is None else f' data-ahead="{min(position, _MOST_AHEAD)}"'
            mark = str(position) if position is not None else _MARKS.get(origin, "")
            mark = f' data-mark="{mark}"' if mark else ""
            yield (
                f'<span class="{classes}"{ahead}{mark} title="{escape(title, quote=True)}">'
                f"{escape(token.text)}</span>"
            )


def _on_one_line(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "⇥")


def _round_row(number: int, one: RecordedRound, output: RecordedOutput) -> tuple[str, ...]:
    text = "".join(token.text for token in one.tokens)
    reason = trace_report.stop_reason(one, output.finish_reason)
    parts = one.parts or (0.0, 0.0, 0.0)
    return (
        str(number),
        f"{one.started:.3f}",
        f"{1000 * one.seconds:.2f}",
        *(f"{1000 * seconds:.2f}" for seconds in parts),
        f"{one.accepted} of {len(one.drafts)}" if one.drafts else "–",
        f"<code>{escape(visible(text))}</code>",
        escape(reason),
        str(one.sequences - 1) if one.sequences > 1 else "–",
    )
