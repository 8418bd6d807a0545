// One request and what came of it. Knows nothing of the page.
const WINDOW = 1.0;      // seconds that a point of the speed curve looks back
const SOONEST = 0.1;     // seconds after the first token before a speed means anything

class Run {
  constructor(prompt, speculates) {
    this.prompt = prompt;
    this.speculates = speculates;
    this.tokens = [];
    this.rounds = [];
    this.firstTokenOf = [];   // index of each round's first token
    this.numEmitted = 0;
    this.numShown = 0;        // tokens that stand in the page
    this.points = [];         // {at, tokens}, seconds since the request was sent
    this.started = performance.now();
    this.usage = null;
    this.block = null;        // the server's own totals
    this.end = null;          // why it ended, in words
    this.abort = new AbortController();
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const block = chunk.outrider;
    if (!block) return;
    for (const round of block.round_traces ?? []) {
      this.firstTokenOf.push(this.numEmitted);
      this.rounds.push(round);
      this.numEmitted += round.emitted;
    }
    if (block.passes !== undefined) this.block = block;
    const tokens = block.tokens ?? [];
    this.tokens.push(...tokens);
    if (tokens.length) {
      this.points.push({at: (performance.now() - this.started) / 1000, tokens: this.tokens.length});
    }
    const reason = chunk.choices[0]?.finish_reason;
    if (reason) this.end = {stop: "end of text", length: "length limit"}[reason] ?? reason;
  }

  roundOf(index) {
    let low = 0, high = this.firstTokenOf.length;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (this.firstTokenOf[middle] <= index) low = middle; else high = middle;
    }
    return low;
  }

  acceptance() {
    const positions = [];
    for (const round of this.rounds) {
      for (let i = 0; i < round.drafted; i++) {
        positions[i] ??= {rounds: 0, accepted: 0};
        positions[i].rounds += 1;
        positions[i].accepted += round.accepted > i;
      }
    }
    return positions;
  }

  // Points of the curve: tokens of the last WINDOW seconds by the time that they took.
  speeds() {
    const speeds = [];
    let back = 0;
    for (const point of this.points) {
      const from = Math.max(point.at - WINDOW, this.points[0].at);
      while (back + 1 < this.points.length && this.points[back + 1].at <= from) back += 1;
      if (point.at - this.points[0].at < SOONEST) continue;
      speeds.push({...point, speed: (point.tokens - this.points[back].tokens) / (point.at - from)});
    }
    return speeds;
  }

  // Over all but the tokens that came first, which waited for the prompt.
  speed() {
    const [first, last] = [this.points[0], this.points.at(-1)];
    return first && last.at > first.at ? (last.tokens - first.tokens) / (last.at - first.at) : null;
  }

  totals() {
    const guessed = this.rounds.filter((round) => round.drafted > 0);
    const drafted = guessed.reduce((sum, round) => sum + round.drafted, 0);
    const accepted = guessed.reduce((sum, round) => sum + round.accepted, 0);
    return {
      passes: this.rounds.length, rounds: guessed.length, drafted, accepted,
      length: guessed.length ? 1 + accepted / guessed.length : null,
    };
  }
}
