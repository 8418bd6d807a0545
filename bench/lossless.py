"""Greedy text with speculation equals greedy text without, bit for bit, at real shapes on a GPU.

python bench/lossless.py [--model preset:qwen3-8b ...] [--dtype bfloat16 float16] [--tokens 64]

Weights are random, so a real draft would never be right: drafts come from an oracle that knows the
plain text and is wrong at about three places in ten, chosen by position. Every k, every batch size,
prompts that arrive together and staggered. Prints one line for each run and exits with 1 where a
text differs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from outrider.batch import Batch
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.models.base import CausalLM
from outrider.models.build import Checkpoint, load_target
from outrider.params import SamplingParams
from outrider.runner.rounds import Masks, Submission
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import Proposal

BATCHES = (1, 7, 32, 64)


class Oracle(Drafter):
    """Proposes the text to come, with mistakes; works on the device only."""

    samples = False

    def __init__(self, num_slots: int, length: int, device: torch.device) -> None:
        self.texts = torch.zeros((num_slots, length), dtype=torch.int64, device=device)

    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        slots = frontier.rows_at(2).groups[0].slots
        index = torch.arange(frontier.max_drafts, device=slots.device)
        place = frontier.num_committed[:, None] + index
        tokens = self.texts[slots[:, None], place.clamp(max=self.texts.shape[1] - 1)]
        wrong = (place * 7919 + slots[:, None] * 104729) % 10 < 3
        return Proposal(tokens ^ wrong.long(), frontier.num_wanted, None)


class Bench:
    """One model's weights, shared by engines of every k."""

    def __init__(self, model: str, dtype: str, options: argparse.Namespace) -> None:
        self.model, self.dtype, self.eager = model, dtype, options.eager
        self.num_tokens, self.max_prompt = options.tokens, options.max_prompt
        self.target: CausalLM | None = None
        self.prompts: list[list[int]] = []
        self.texts: list[tuple[int, ...]] = []

    def _load(self, checkpoint: Checkpoint) -> CausalLM:
        if self.target is None:
            self.target = load_target(checkpoint)
        return self.target

    def engine(self, num_drafts: int) -> tuple[Engine, Oracle]:
        """An engine whose drafts are the oracle's; without drafts it decodes plainly."""
        length = self.max_prompt + self.num_tokens
        config = EngineConfig(
            self.model,
            dtype=self.dtype,  # type: ignore[arg-type]
            load_format="dummy" if self.model.startswith("preset:") else "auto",
            device="cuda",
            max_num_seqs=max(BATCHES),
            max_model_len=length,
            max_prefill_tokens=2048,
            enforce_eager=self.eager,
            speculative_config=SpeculativeConfig("ngram", None, num_drafts) if num_drafts else None,
        )
        oracle = Oracle(max(BATCHES) + 1, length, torch.device("cuda"))
        with (
            mock.patch("outrider.engine.load_target", self._load),
            mock.patch("outrider.engine.build_drafter", lambda *_: oracle),
        ):
            engine = Engine(config)
        submit = engine.runner.submit

        def watched(batch: Batch, masks: Masks | None = None) -> Submission:
            for span in batch.prefill:
                text = self._text_of(engine, span.sequence_id)
                oracle.texts[span.slot, : len(text)] = torch.tensor(text, device="cuda")
            return submit(batch, masks)

        engine.runner.submit = watched  # type: ignore[method-assign]
        return engine, oracle

    def _text_of(self, engine: Engine, sequence_id: int) -> list[int]:
        request = engine.scheduler.sequence(sequence_id).request
        index = int(request.request_id.split("-")[0])
        return [*request.prompt_token_ids, *(self.texts[index] if self.texts else ())]

    def run(self, engine: Engine, indices: Sequence[int], staggered: bool) -> dict[int, object]:
        """Completions of prompts by index."""
        params = SamplingParams(max_tokens=self.num_tokens, temperature=0, ignore_eos=True)
        waiting = list(indices)
        outputs: dict[int, object] = {}
        step = 0
        while waiting or engine.has_work:
            arriving = waiting[: max(len(indices) // 8, 1)] if staggered else waiting
            if step % 3 == 0:
                for index in arriving:
                    engine.add_request(f"{index}-{step}", self.prompts[index], params)
                waiting = waiting[len(arriving) :]
            for output in engine.step():
                if output.finished:
                    outputs[int(output.request_id.split("-")[0])] = output.completions[0]
            step += 1
        return outputs

    def check(self, num_drafts: int) -> tuple[int, int]:
        """Compare every batch size with the plain texts: tokens compared, texts that differ."""
        engine, _ = self.engine(num_drafts)
        compared = wrong = 0
        for batch in BATCHES:
            for staggered in (False, True) if batch > 1 else (False,):
                begin = time.perf_counter()
                outputs = self.run(engine, range(batch), staggered)
                seconds = time.perf_counter() - begin
                differing = [i for i, o in outputs.items() if o.token_ids != self.texts[i]]  # type: ignore[attr-defined]
                rounds = [r for o in outputs.values() for r in o.rounds if r.draft_token_ids]  # type: ignore[attr-defined]
                accepted = sum(r.num_accepted + 1 for r in rounds) / max(len(rounds), 1)
                compared += self.num_tokens * batch
                wrong += len(differing)
                where = [
                    (
                        i,
                        next(
                            j
                            for j, (a, b) in enumerate(
                                zip(outputs[i].token_ids, self.texts[i], strict=False)
                            )
                            if a != b
                        ),
                    )  # type: ignore[attr-defined]
                    for i in differing[:4]
                ]
                print(
                    f"{self.model} {self.dtype} k {num_drafts} batch {batch} "
                    f"{'staggered' if staggered else 'together'}: {len(differing)} differ {where}, "
                    f"acceptance length {accepted:.2f}, {seconds:.2f} s",
                    flush=True,
                )
        return compared, wrong

    def prepare(self) -> None:
        """Prompts, and their plain texts at the largest batch."""
        engine, _ = self.engine(0)
        rng = torch.Generator().manual_seed(0)
        vocab_size = engine.model_config.vocab_size
        for index in range(max(BATCHES)):
            length = 3 + (index * 37) % (self.max_prompt - 3)
            prompt = torch.randint(2, vocab_size, (length,), generator=rng)
            self.prompts.append(prompt.tolist())
        outputs = self.run(engine, range(max(BATCHES)), False)
        self.texts = [outputs[i].token_ids for i in range(max(BATCHES))]  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=["preset:qwen3-8b", "preset:qwen3.5-9b"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=150, help="tokens of the longest prompt")
    parser.add_argument("--drafts", type=int, nargs="+", default=list(range(0, 9)))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    results = []
    for model in options.model:
        for dtype in options.dtype:
            bench = Bench(model, dtype, options)
            bench.prepare()
            for num_drafts in options.drafts:
                compared, wrong = bench.check(num_drafts)
                results.append(
                    {"model": model, "dtype": dtype, "k": num_drafts, "tokens": compared,
                     "texts that differ": wrong}
                )  # fmt: skip
                torch.cuda.empty_cache()
            del bench
            torch.cuda.empty_cache()
    tokens, wrong = (sum(int(r[name]) for r in results) for name in ("tokens", "texts that differ"))
    print(f"{tokens} tokens compared, {wrong} texts differ")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
