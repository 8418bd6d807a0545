"""Acceptance of a draft on held-out prompts, measured with the engine itself.

    python bench/acceptance.py models/tiny-qwen3.5 --speculative-algorithm mtp

Greedy texts of small models loop, and loops flatter acceptance: the share of repeated 8-grams of
the generated texts is reported beside every number. One JSON line per setting goes to --output.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from outrider.output import total_speculation

HELD_OUT = Path(__file__).parent.parent / "training" / "heldout.jsonl"


def repeated_share(token_ids: Sequence[int], size: int = 8) -> float:
    """Share of the text's n-grams that it has seen before."""
    grams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def summary(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What speculation did for a set of texts."""
    stats = total_speculation(outputs)
    length = stats.acceptance_length
    shares = [repeated_share(output.token_ids) for output in outputs]
    return {
        "num_texts": len(outputs),
        "num_tokens": stats.num_tokens,
        "target_passes": stats.num_passes,
        "tokens_per_pass": round(stats.num_tokens / stats.num_passes, 3),
        "acceptance_length": None if length is None else round(length, 3),
        "accepted_by_position": [
            round(count / stats.num_rounds, 3) for count in stats.accepted_per_position
        ],
        "repeated_8grams": round(sum(shares) / len(shares), 3),
    }


def measure(
    llm: LLM, kinds: dict[str, list[str]], options: dict[str, Any], setting: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row for each kind of text."""
    rows: list[dict[str, Any]] = []
    for kind, prompts in kinds.items():
        # A seed for each prompt: texts that shared their noise would be one sample, not many.
        params = [SamplingParams(seed=index, **options) for index in range(len(prompts))]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        assert isinstance(outputs, list)
        seconds = round(time.perf_counter() - begin, 1)
        rows.append(setting | {"kind": kind} | summary(outputs) | {"seconds": seconds})
    return rows


def header(llm: LLM) -> dict[str, Any]:
    """What a result was made with."""
    device = llm.engine.runner.options.device
    return {
        "command": " ".join([f"bench/{Path(sys.argv[0]).name}", *_without_output(sys.argv[1:])]),
        "outrider": outrider.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": str(llm.engine.runner.options.dtype),
        "ops": "reference",
    }


def _without_output(words: Sequence[str]) -> list[str]:
    """The command as anyone would type it, without the place of the result."""
    kept = list(words)
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--speculative-algorithm", default="mtp")
    parser.add_argument("--speculative-draft-model")
    parser.add_argument("--speculative-num-draft-tokens", type=int, default=3)
    parser.add_argument("--draft-sampling", nargs="+", default=["argmax"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--num-prompts", type=int, default=120, help="of each kind of text")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    kinds: dict[str, list[str]] = {}
    for line in HELD_OUT.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        kinds.setdefault(entry["kind"], []).append(entry["text"])
    kinds = {kind: texts[: args.num_prompts] for kind, texts in kinds.items()}
    num_drafts = args.speculative_num_draft_tokens
    spec = SpeculativeConfig(args.speculative_algorithm, args.speculative_draft_model, num_drafts)
    llm = LLM(args.model, speculative_config=spec, dtype="float32", max_num_seqs=32)
    rows: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        for how in args.draft_sampling if temperature > 0 else ["argmax"]:
            options = {
                "max_tokens": args.num_tokens,
                "temperature": temperature,
                "ignore_eos": True,
                "draft_sampling": how,
            }
            setting = {
                "method": args.speculative_algorithm,
                "num_drafts": num_drafts,
                "temperature": temperature,
                "draft_sampling": how,
            }
            rows += measure(llm, kinds, options, setting)
            for row in rows[-len(kinds) :]:
                print(json.dumps(row), flush=True)
    if args.output is not None:
        lines = [json.dumps(row) for row in (header(llm), *rows)]
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
