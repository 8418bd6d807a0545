// Everything that comes from the server is put in place as text, never as markup.
const $ = (id) => document.getElementById(id);
const MOST_POINTS = 400; // of the curve as it is drawn
const MOST_REQUESTS = 12;

let run = null;          // the request that is shown
let drawing = false;
let drawingTook = 0;     // milliseconds, of the last time

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const number = (value, digits = 1) =>
  value === null || value === undefined || !isFinite(value) ? "–" : value.toFixed(digits);

// Text as it can be read on one line: what cannot be seen is spelled out.
const visible = (text) => JSON.stringify(text).replace(/[\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
  (letter) => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"));

function who(token, round) {
  const [kind, position] = token.origin.split(":");
  if (kind === "drafted") return `drafted at position ${position}, accepted by the target`;
  if (kind === "corrected") return "the target's own, in place of a refused guess";
  if (kind === "bonus") return "bonus: the target's own, after guesses that were all right";
  return round?.prompt_pass ? "the target's own, from the pass over the prompt"
    : "the target's own: nothing was guessed in this pass";
}

function tokenElement(token, index) {
  const [kind, position] = token.origin.split(":");
  const made = element("span", token.text, {
    class: `token ${kind}${token.text ? "" : " empty"}`, tabindex: index ? "-1" : "0", role: "img",
    "data-index": index,
  });
  if (position) made.setAttribute("data-ahead", Math.min(Number(position), 6));
  const mark = {corrected: "×", bonus: "+"}[kind] ?? position;
  if (mark) made.setAttribute("data-mark", mark);
  let label = `${visible(token.text)}, ${who(token, run.rounds[run.roundOf(index)])}`;
  if (token.rejected.length) label += `; refused: ${token.rejected.map(visible).join(", ")}`;
  made.setAttribute("aria-label", label);
  return made;
}

function showDetail(target) {
  const index = Number(target.dataset.index), token = run.tokens[index];
  const which = run.roundOf(index), round = run.rounds[which];
  const detail = $("detail");
  detail.replaceChildren();
  const heading = element("p");
  heading.append(element("code", visible(token.text)), ` token ${index + 1}, id ${token.token_id}`);
  detail.append(heading, element("p", who(token, round)));
  if (round) {
    const took = round.seconds === null ? "" : `, ${(round.seconds * 1000).toFixed(1)} ms`;
    const told = `pass ${which + 1}: ${round.accepted} of ${round.drafted} guesses right${took}`;
    detail.append(element("p", round.drafted ? told : `pass ${which + 1}${took}`, {class: "quiet"}));
  }
  if (token.rejected.length) {
    detail.append(element("p", token.rejected.length > 1 ? "Refused guesses, in order:" : "Refused guess:"));
    const list = element("ol");
    for (const guess of token.rejected) {
      const item = element("li");
      item.append(element("code", visible(guess), {class: "rejected"}));
      list.append(item);
    }
    detail.append(list);
  }
  detail.hidden = false;
  const rects = target.getClientRects(), box = rects[rects.length - 1];
  const width = detail.offsetWidth, height = detail.offsetHeight;
  const left = Math.min(Math.max(box.left, 8), document.documentElement.clientWidth - width - 8);
  const below = box.bottom + 6 + height < window.innerHeight;
  detail.style.left = `${left + window.scrollX}px`;
  detail.style.top = `${(below ? box.bottom + 6 : box.top - height - 6) + window.scrollY}px`;
  document.querySelector("[aria-describedby=detail]")?.removeAttribute("aria-describedby");
  target.setAttribute("aria-describedby", "detail");
}

function hideDetail() { $("detail").hidden = true; }

// One token is a stop of the Tab key, the arrow keys go on from there.
function focusToken(index) {
  const spans = $("tokens").children;
  spans[Math.min(Math.max(index, 0), spans.length - 1)].focus();
}

function settle(target) {
  $("tokens").querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
  target.setAttribute("tabindex", "0");
  showDetail(target);
}

function showStats() {
  const totals = run.totals(), usage = run.usage, list = $("stats");
  const first = run.points[0]?.at;
  const entries = {
    "Tokens": run.tokens.length,
    "Target passes": totals.passes,
    "Tokens a round": totals.length === null ? "–" : totals.length.toFixed(2),
    "Guesses accepted": totals.drafted ? `${totals.accepted} of ${totals.drafted}` : "–",
    "First token after": first === undefined ? "–" : `${(first * 1000).toFixed(0)} ms`,
    "Tokens/s after it": number(run.speed()),
    "Prompt tokens": usage ? `${usage.prompt_tokens} (${usage.prompt_tokens_details.cached_tokens} cached)` : "–",
    "End": run.end ?? "running",
  };
  list.replaceChildren();
  for (const [name, value] of Object.entries(entries)) {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", String(value)));
    list.append(pair);
  }
}

const X0 = 40, X1 = 410, Y0 = 170, Y1 = 14;

function axis(svg, top, unit) {
  for (const share of [0, 0.5, 1]) {
    const y = Y0 + (Y1 - Y0) * share, value = top * share;
    svg.append(drawn("line", {x1: X0, x2: X1, y1: y, y2: y, class: "axis"}));
    const digits = unit || top >= 10 ? 0 : 1;
    svg.append(drawn("text", {x: X0 - 6, y: y + 4, "text-anchor": "end", class: "quiet"}, value.toFixed(digits) + unit));
  }
}

function fillTable(id, rows) {
  if (!run.end && !$(id).closest("details").open) return;  // nobody sees it yet
  const body = $(id).tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => element("td", String(cell))));
    return row;
  }));
}

function drawAcceptance() {
  const svg = $("acceptance"), positions = run.acceptance();
  svg.replaceChildren();
  axis(svg, 100, "%");
  const step = (X1 - X0) / Math.max(positions.length, 1), points = [];
  positions.forEach(({rounds, accepted}, i) => {
    const share = accepted / rounds, x = X0 + step * (i + 0.5), y = Y0 + (Y1 - Y0) * share;
    points.push(`${x.toFixed(1)},${y.toFixed(1)}`);
    svg.append(drawn("circle", {cx: x, cy: y, r: 4, class: "dot", "data-share": share}));
    const above = y - 10 < Y1 + 4 ? y + 20 : y - 10;
    svg.append(drawn("text", {x, y: above, "text-anchor": "middle"}, `${Math.round(share * 100)}%`));
    svg.append(drawn("text", {x, y: Y0 + 20, "text-anchor": "middle", class: "quiet"}, i + 1));
  });
  svg.prepend(drawn("polyline", {points: points.join(" "), class: "curve"}));
  if (!positions.length) svg.append(drawn("text", {x: 225, y: 60, "text-anchor": "middle", class: "quiet"}, "nothing was guessed"));
  fillTable("acceptance-table", positions.map(({rounds, accepted}, i) =>
    [i + 1, rounds, accepted, `${(100 * accepted / rounds).toFixed(1)}%`]));
}

function drawSpeed() {
  const svg = $("speed"), speeds = run.speeds();
  svg.replaceChildren();
  const most = speeds.reduce((most, point) => Math.max(most, point.speed), 1);
  const unit = 10 ** Math.floor(Math.log10(most));
  const top = [1, 2, 5, 10].map((times) => times * unit).find((value) => value >= most);
  axis(svg, top, "");
  if (!speeds.length) {
    svg.append(drawn("text", {x: 225, y: 60, "text-anchor": "middle", class: "quiet"}, "too few tokens yet"));
    fillTable("speed-table", []);
    return;
  }
  const begin = run.points[0].at, length = Math.max(speeds.at(-1).at - begin, 0.1);
  const stride = Math.ceil(speeds.length / MOST_POINTS);
  const shown = speeds.filter((_, i) => i % stride === 0 || i === speeds.length - 1);
  const place = ({at, speed}) =>
    `${(X0 + (X1 - X0) * (at - begin) / length).toFixed(1)},${(Y0 + (Y1 - Y0) * speed / top).toFixed(1)}`;
  svg.append(drawn("polyline", {points: shown.map(place).join(" "), class: "curve"}));
  for (const share of [0, 0.5, 1]) {
    const x = X0 + (X1 - X0) * share, anchor = ["start", "middle", "end"][share * 2];
    svg.append(drawn("text", {x, y: Y0 + 20, "text-anchor": anchor, class: "quiet"}, `${(length * share).toFixed(1)} s`));
  }
  fillTable("speed-table", shown.map(({at, tokens, speed}) => [(at - begin).toFixed(3), tokens, speed.toFixed(1)]));
}

function showTokens() {
  const text = $("text"), follows = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  const fresh = run.tokens.slice(run.numShown);
  if (!fresh.length) return;
  $("tokens").append(...fresh.map((token, i) => tokenElement(token, run.numShown + i)));
  run.numShown = run.tokens.length;
  if (follows) text.scrollTop = text.scrollHeight;
}

// Once a frame at most however fast the tokens come, and less often where the text is so long that
// laying it out takes time: four fifths are left for the user.
function draw() {
  if (drawing) return;
  drawing = true;
  setTimeout(() => requestAnimationFrame(() => {
    drawing = false;
    const started = performance.now();
    for (const part of [showTokens, showStats, drawAcceptance, drawSpeed]) part();
    document.body.getBoundingClientRect();  // the layout is part of what it takes
    drawingTook = performance.now() - started;
  }), run.end ? 0 : 4 * drawingTook);
}

function remember() {
  const totals = run.totals(), row = element("tr");
  const start = run.prompt.length > 40 ? run.prompt.slice(0, 40) + "…" : run.prompt;
  const cells = [visible(start), run.speculates ? totals.drafted : "off", run.tokens.length, totals.passes,
    number(totals.length, 2), number(run.speed()), run.end];
  row.append(...cells.map((cell) => element("td", String(cell))));
  const body = $("history").tBodies[0];
  body.prepend(row);
  while (body.rows.length > MOST_REQUESTS) body.lastChild.remove();
}

function showError(message, field) {
  $("error").textContent = message;
  $("error").hidden = false;
  const name = {prompt: "prompt", max_tokens: "max_tokens", temperature: "temperature", seed: "seed"}[field]
    ?? (/max_draft_tokens/.test(field ?? "") ? "max_draft_tokens" : /key/.test(field ?? "") ? "key" : null);
  if (name) {
    $(name).setAttribute("aria-invalid", "true");
    $(name).setAttribute("aria-describedby", "error");
    $(name).focus();
  }
}

function clearError() {
  $("error").hidden = true;
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
}

const headers = () => {
  const key = $("key").value.trim();
  return key ? {Authorization: `Bearer ${key}`} : {};
};

function body() {
  const asked = {
    prompt: $("prompt").value, stream: true, stream_options: {include_usage: true}, outrider_trace: true,
    speculation: {enabled: $("speculation").checked},
  };
  for (const name of ["max_tokens", "temperature", "seed", "max_draft_tokens"]) {
    const text = $(name).value.trim();
    if (!text) continue;
    const whole = name !== "temperature";
    if (!(whole ? /^-?\d+$/ : /^-?(\d+\.?\d*|\.\d+)$/).test(text)) {
      throw Object.assign(new Error(`${name}: got ${visible(text)}; allowed: a ${whole ? "whole number" : "number"}`), {field: name});
    }
    const value = Number(text);
    if (!(whole ? Number.isSafeInteger(value) : Number.isFinite(value))) {  // another one would be sent
      throw Object.assign(new Error(`${name}: got ${visible(text)}; allowed on this page: what a browser can hold, ${whole ? `up to ${Number.MAX_SAFE_INTEGER}` : "a finite number"}`), {field: name});
    }
    if (name === "max_draft_tokens") asked.speculation.max_draft_tokens = value; else asked[name] = value;
  }
  return asked;
}

// An error of the server in its own words, and the field that it blames.
async function failure(answer) {
  let error = null;
  try { error = (await answer.json()).error; } catch { /* no JSON: the status has to do */ }
  const again = answer.headers.get("Retry-After");
  const when = again ? ` (try again in ${again} s)` : "";
  const message = error?.message ?? `the server answered with status ${answer.status}`;
  return Object.assign(new Error(message + when), {field: answer.status === 401 ? "key" : error?.param});
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) throw new Error("the connection ended before the completion did");
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), {field: chunk.error.param});
      yield chunk;
    }
  }
}

async function complete(event) {
  event?.preventDefault();
  if (!$("stop").disabled) return;
  clearError();
  let asked;
  try { asked = body(); } catch (error) { showError(error.message, error.field); return; }
  hideDetail();
  run = new Run(asked.prompt, asked.speculation.enabled);
  $("prompt-shown").textContent = asked.prompt;
  $("tokens").replaceChildren();
  busy(true);
  draw();
  try {
    const answer = await fetch("/v1/completions", {
      method: "POST", body: JSON.stringify(asked), signal: run.abort.signal,
      headers: {"Content-Type": "application/json", ...headers()},
    });
    if (!answer.ok) throw await failure(answer);
    for await (const chunk of events(answer)) { run.take(chunk); draw(); }
  } catch (error) {
    if (run.abort.signal.aborted) {
      run.end = "stopped";
    } else {
      run.end = "error";
      const lost = error instanceof TypeError && !error.field;
      showError(lost ? "the server cannot be reached" : error.message, error.field);
    }
  }
  busy(false);
  draw();
  if (run.tokens.length) remember();
}

function busy(is) {
  $("start").disabled = is;
  $("stop").disabled = !is;
  $("text").setAttribute("aria-busy", is);
}

function stop() { run?.abort.abort(); }

async function ask() {
  let ready = false;
  try {
    const answer = await fetch("/health/ready");
    ready = answer.ok;
    const models = await fetch("/v1/models", {headers: headers()});
    $("model").textContent = models.ok ? (await models.json()).data[0].id : "";
    const needs = models.status === 401 ? "; asks for an API key" : "";
    $("health").textContent = ready ? `ready${needs}` : "the engine is not ready yet: it loads, or is started again";
  } catch {
    $("health").textContent = "the server cannot be reached";
  }
  setTimeout(ask, ready ? 15000 : 2000);
}

$("form").addEventListener("submit", complete);
$("stop").addEventListener("click", stop);
$("marks").addEventListener("change", () => $("text").classList.toggle("marks", $("marks").checked));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) complete(event);
  if (event.key === "Escape") { if (!$("detail").hidden) hideDetail(); else if (!$("stop").disabled) stop(); }
});
$("tokens").addEventListener("pointerover", (event) => {
  const token = event.target.closest(".token");
  if (token) showDetail(token);
});
$("tokens").addEventListener("pointerleave", hideDetail);
$("tokens").addEventListener("focusin", (event) => {
  const token = event.target.closest(".token");
  if (token) settle(token);
});
$("tokens").addEventListener("focusout", hideDetail);
$("tokens").addEventListener("keydown", (event) => {
  const last = $("tokens").children.length - 1, here = Number(event.target.dataset?.index);
  const goal = {ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: last}[event.key];
  if (goal === undefined) return;
  event.preventDefault();
  focusToken(goal);
});
$("key").addEventListener("change", () => { clearError(); });
ask();
