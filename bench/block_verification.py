"""What block verification gains over token-wise rejection on real drafts.

    python bench/block_verification.py models/tiny-qwen3.5 --speculative-algorithm mtp

Both rules are evaluated on the same blocks, which sampled drafts made while texts were written:
the expected number of accepted drafts given a block's drafts and both distributions, which needs no
further random numbers. With k drafts, P(tau >= i) is 1 - prod_{j >= i} (1 - h_j) for `block` and
prod_{j <= i} min(1, p_j / q_j) for token-wise rejection.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from unittest import mock

import torch
from acceptance import HELD_OUT, header
from torch import Tensor

from outrider import LLM, SamplingParams, SpeculativeConfig
from outrider.runner import decide
from outrider.spec.verify import BlockTerms, SparseLaw, block_terms


def expected_accepted(
    probs: Tensor, draft_token_ids: Tensor, num_drafts: Tensor, q: SparseLaw, terms: BlockTerms
) -> tuple[Tensor, Tensor]:
    """Expected accepted drafts of each block, [B] under `block` and [B] under token-wise."""
    refusals = 1.0 - terms.accept[:, 1:].double()
    none_from = refusals.flip(-1).cumprod(-1).flip(-1)  # no i' >= i is accepted
    block = (1.0 - none_from).sum(-1)
    p_drafted = probs[:, :-1].gather(-1, draft_token_ids[..., None])[..., 0].double()
    q_drafted = torch.where(q.token_ids == draft_token_ids[..., None], q.probs, 0.0).sum(-1)
    valid = torch.arange(draft_token_ids.shape[1], device=probs.device) < num_drafts[:, None]
    chances = torch.where(valid, (p_drafted / q_drafted).clamp(max=1.0), 0.0)
    return block, chances.cumprod(-1).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--speculative-algorithm", default="mtp")
    parser.add_argument("--speculative-draft-model")
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    texts = [json.loads(line)["text"] for line in HELD_OUT.read_text("utf-8").splitlines()]
    texts = texts[:: max(len(texts) // args.num_prompts, 1)][: args.num_prompts]
    params = [
        SamplingParams(
            max_tokens=args.num_tokens,
            temperature=args.temperature,
            seed=seed,
            ignore_eos=True,
            draft_sampling="sampled",
        )
        for seed in range(len(texts))
    ]
    rows: list[dict[str, object]] = []
    for num_drafts in args.num_drafts:
        spec = SpeculativeConfig(
            args.speculative_algorithm, args.speculative_draft_model, num_drafts
        )
        llm = LLM(args.model, speculative_config=spec, dtype="float32", max_num_seqs=16)
        rows = rows or [header(llm)]
        sums = torch.zeros(3, dtype=torch.float64)

        def recorded(
            probs: Tensor,
            draft_token_ids: Tensor,
            num_drafts: Tensor,
            q: SparseLaw,
            sums: Tensor = sums,
        ) -> BlockTerms:
            terms = block_terms(probs, draft_token_ids, num_drafts, q)
            pair = expected_accepted(probs, draft_token_ids, num_drafts, q, terms)
            drafted = num_drafts > 0
            sums += torch.stack([*(x[drafted].sum() for x in pair), drafted.sum()]).cpu()
            return terms

        with mock.patch.object(decide, "block_terms", recorded):
            llm.generate(texts, params)
        block, token_wise = (1 + float(sums[i] / sums[2]) for i in (0, 1))
        row = {
            "method": args.speculative_algorithm,
            "num_drafts": num_drafts,
            "temperature": args.temperature,
            "num_blocks": int(sums[2]),
            "expected_acceptance_length_block": round(block, 4),
            "expected_acceptance_length_token_wise": round(token_wise, 4),
            "gain": round(block / token_wise - 1, 4),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
