"""`outrider demo`: the same prompts with speculation and without, and what it saved.

The comparison is one that a user of the library could write.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch

from outrider import render
from outrider.checks import check_int
from outrider.config import MAX_SPECULATIVE_TOKENS, DtypeName, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.output import RequestOutput, total_speculation
from outrider.params import SamplingParams
from outrider.spec.names import METHODS, canonical_method

BUNDLED_MODELS: Mapping[str, tuple[str, str | None]] = {
    "mtp": ("models/tiny-qwen3.5", None),
    "eagle3": ("models/tiny-qwen3", "models/tiny-qwen3-eagle3"),
    "ngram": ("models/tiny-qwen3.5", None),
}
"""Target and draft checkpoint that each method is shown with."""
_KV_CACHE_GIB = 0.25  # one short sequence at a time
_WARM_UP_TOKENS = 16
_SAME, _DIFFERENT = 0, 1


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and what to call it."""

    title: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """One prompt continued twice; times are in seconds."""

    prompt: Prompt
    speculative: RequestOutput
    plain: RequestOutput
    speculative_time: float
    plain_time: float

    @property
    def first_difference(self) -> int | None:
        """Index of the first output token that is not the same; None where all are."""
        return first_difference(self.speculative.token_ids, self.plain.token_ids)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that is not the same; None where all are."""
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the demo can be told."""
    parser.add_argument(
        "--model", metavar="MODEL", help="folder or hub id (default: a small one of the repository)"
    )
    parser.add_argument(
        "--draft-model", metavar="MODEL", help="the draft's own checkpoint, for methods with one"
    )
    parser.add_argument(
        "--method", default="mtp", metavar="NAME", help=f"draft method: {', '.join(METHODS)} (mtp)"
    )
    parser.add_argument(
        "--num-draft-tokens", type=int, default=3, metavar="N", help="drafts a round (3)"
    )
    parser.add_argument(
        "--tokens", type=int, default=96, metavar="N", help="most output tokens a prompt (96)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 0 if both texts of every prompt are the same, else 1."""
    params = SamplingParams(max_tokens=args.tokens, temperature=0)
    method = canonical_method(args.method)
    model, draft_model, name = args.model, args.draft_model, args.model
    check_int(ConfigError, "num_draft_tokens", args.num_draft_tokens, 1, MAX_SPECULATIVE_TOKENS)
    if model is None:
        if method not in BUNDLED_MODELS:
            raise ConfigError(
                f"no bundled model shows method {method}",
                allowed=BUNDLED_MODELS,
                hint="name a model with --model",
            )
        target_name, draft_name = BUNDLED_MODELS[method]
        model, name = str(bundled(target_name)), target_name
        if draft_model is None and draft_name is not None:
            draft_model = str(bundled(draft_name))
    spec = SpeculativeConfig(method, draft_model, args.num_draft_tokens)
    color = render.use_color(args.color, sys.stdout, os.environ)
    prompts = load_prompts()
    llm = LLM(
        model,
        speculative_config=spec,
        dtype=_dtype(),
        max_num_seqs=1,
        kv_cache_memory_gib=_KV_CACHE_GIB,
    )

    k = spec.num_speculative_tokens
    print(f"{name}: {len(prompts)} prompts, up to {args.tokens} tokens each")
    print(f"temperature 0, speculation by {spec.method} with {k} draft tokens a round")
    if color:
        print(render.legend(k))
    comparisons: list[Comparison] = []
    for comparison in compare(llm, prompts, params):
        comparisons.append(comparison)
        print("", *_prompt_lines(llm, len(comparisons), comparison, color), sep="\n", flush=True)
    print("", *summary_lines(comparisons, f"{spec.method}, k = {k}"), sep="\n")
    same = all(comparison.first_difference is None for comparison in comparisons)
    return _SAME if same else _DIFFERENT


def _dtype() -> DtypeName:
    """float32 on a CPU, where half precision is slow, so that both texts are the same bits."""
    return "auto" if torch.cuda.is_available() else "float32"


def bundled(name: str) -> Path:
    """A bundled model's folder, in the source checkout or else below the current folder.

    Raises:
        ConfigError: it is in neither.
    """
    checkout = Path(__file__).resolve().parents[2]
    places = [checkout / name, Path.cwd() / name]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ConfigError(
        "the demo's model is not here",
        got=name,
        allowed=f"a model folder at {' or '.join(dict.fromkeys(map(str, places)))}",
        hint="run the demo in a clone of the repository, or name a model with --model",
    )


def load_prompts() -> list[Prompt]:
    """The built-in prompts."""
    file = resources.files("outrider").joinpath("demo_prompts.json")
    return [Prompt(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def compare(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[Comparison]:
    """Continue each prompt with speculation and at once without, so that both meet the same load.

    One prompt at a time, which is where latency counts. A request that switches speculation off
    runs the target's own passes and no draft.
    """
    plain_params = replace(params, speculation=False)
    warm_up = min(params.max_tokens, _WARM_UP_TOKENS)
    for variant in (params, plain_params):
        llm.generate(prompts[0].text, replace(variant, max_tokens=warm_up))
    for prompt in prompts:
        speculative, speculative_time = _timed(llm, prompt, params)
        plain, plain_time = _timed(llm, prompt, plain_params)
        yield Comparison(prompt, speculative, plain, speculative_time, plain_time)


def _timed(llm: LLM, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, float]:
    started = time.perf_counter()
    output = llm.generate(prompt.text, params)
    return output, time.perf_counter() - started


def _prompt_lines(llm: LLM, number: int, comparison: Comparison, color: bool) -> list[str]:
    """A prompt, its continuation, and how both runs fared."""
    prompt, speculative, plain = comparison.prompt, comparison.speculative, comparison.plain
    heading = render.paint(f"--- {number}. {prompt.title} ---", render.BOLD if color else "")
    painter = render.TextPainter(llm.tokenizer, color, sys.stdout.isatty())
    text = painter.push(speculative.completions[0])
    lines = [
        heading,
        render.paint(prompt.text, render.DIM if color else "") + text,
        f"with speculation:    {render.acceptance_line(speculative.speculation)}",
    ]
    without = f"without speculation: {render.acceptance_line(plain.speculation)}"
    difference = comparison.first_difference
    if difference is None:
        return [*lines, f"{without}, the same text"]
    return [*lines, f"{without}, ANOTHER TEXT from output token {difference} on:", _shown(plain)]


def _shown(output: RequestOutput) -> str:
    return render.harmless(output.text) if sys.stdout.isatty() else output.text


def summary_lines(comparisons: Sequence[Comparison], name: str) -> list[str]:
    """Totals of all prompts, the two speeds, and the verdict.

    Args:
        name: what to call the run with speculation in the table.
    """
    ours = total_speculation(c.speculative for c in comparisons)
    theirs = total_speculation(c.plain for c in comparisons)
    seconds = sum(c.speculative_time for c in comparisons)
    plain_seconds = sum(c.plain_time for c in comparisons)
    rows = [("", "target passes", "tokens", "seconds", "tokens/s")]
    for label, stats, time_taken in (("plain", theirs, plain_seconds), (name, ours, seconds)):
        speed = f"{stats.num_tokens / time_taken:.1f}"
        passes, tokens = str(stats.num_passes), str(stats.num_tokens)
        rows.append((label, passes, tokens, f"{time_taken:.2f}", speed))

    saved = theirs.num_passes - ours.num_passes
    ratio = (ours.num_tokens / seconds) / (theirs.num_tokens / plain_seconds)
    different = [i for i, c in enumerate(comparisons, start=1) if c.first_difference is not None]
    verdict = f"Both runs gave the same text for all {len(comparisons)} prompts, token by token."
    if different:
        verdict = f"The two runs DIFFER in prompt {', '.join(map(str, different))}: this is a bug."
    return [
        f"total: {render.acceptance_line(ours)}",
        "",
        *render.table(rows),
        "",
        verdict,
        f"Target passes saved: {saved} of {theirs.num_passes} ({saved / theirs.num_passes:.0%}). "
        f"Measured speed: {ratio:.2f} times plain decoding.",
    ]
