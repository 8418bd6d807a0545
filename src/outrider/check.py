"""`outrider check`: does a checkpoint give the same text with and without speculation?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TextIO

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.demo import first_difference, load_prompts
from outrider.errors import ConfigError, OutriderError
from outrider.llm import LLM
from outrider.output import RequestOutput, total_speculation
from outrider.params import SamplingParams
from outrider.render import harmless
from outrider.trace import SpeculationStats


class CheckResult(IntEnum):
    """Exit code of a check."""

    RIGHT = 0
    WRONG_OUTPUT = 1
    COULD_NOT_RUN = 2


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    Attributes:
        model: one line that says what the checkpoint is.
        mismatches: one line for each text that differed, with the place.
        seconds: generation time, plain and speculative.
        error: why it could not run.
    """

    result: CheckResult
    model: str = ""
    num_texts: int = 0
    num_tokens: int = 0
    mismatches: tuple[str, ...] = ()
    speculation: SpeculationStats = dataclasses.field(default_factory=SpeculationStats)
    plain_passes: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    error: OutriderError | None = None


def check(config: EngineConfig, *, num_tokens: int = 64) -> CheckReport:
    """Generate a fixed set of texts with and without config.speculative_config and compare them.

    Greedy texts are compared, and texts at temperature 1 with seeds and coupled drafts, which must
    be the same token for token as well. On a GPU in half precision a difference may come from an
    operation whose rounding depends on the batch; it is reported all the same.

    Args:
        config: what to check; without a speculative_config the model is only run twice.
        num_tokens: tokens of each text.
    """
    try:
        _refuse_sampled_drafts(config)
        prompts = [prompt.text for prompt in load_prompts()]
        plain_llm = _open(dataclasses.replace(config, speculative_config=None))
        plain, plain_seconds = _generate(plain_llm, prompts, num_tokens)
        model = describe_model(plain_llm)
        del plain_llm  # two models need not fit side by side
        drafted, drafted_seconds = _generate(_open(config), prompts, num_tokens)
    except OutriderError as error:
        return CheckReport(CheckResult.COULD_NOT_RUN, error=error)
    mismatches = [
        line
        for index, (one, other) in enumerate(zip(plain, drafted, strict=True))
        if (line := _difference(index, one, other))
    ]
    return CheckReport(
        result=CheckResult.WRONG_OUTPUT if mismatches else CheckResult.RIGHT,
        model=model,
        num_texts=len(plain),
        num_tokens=sum(len(output.token_ids) for output in plain),
        mismatches=tuple(mismatches),
        speculation=total_speculation(drafted),
        plain_passes=total_speculation(plain).num_passes,
        seconds=(plain_seconds, drafted_seconds),
    )


def _refuse_sampled_drafts(config: EngineConfig) -> None:
    spec = config.speculative_config
    if spec is None:
        return
    usual = SpeculativeConfig(spec.method, spec.model)
    for name in ("draft_sampling", "draft_top_m"):
        if getattr(spec, name) != getattr(usual, name):
            raise ConfigError(
                f"{name}: a check draws drafts in the two ways whose texts can be compared, "
                "argmax and coupled",
                got=getattr(spec, name),
                hint="leave it out",
            )


def _open(config: EngineConfig) -> LLM:
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return LLM(**options)


def _params(num_prompts: int, num_tokens: int) -> list[SamplingParams]:
    """Greedy for each prompt, then temperature 1 for each."""
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    warm = [
        SamplingParams(
            max_tokens=num_tokens, temperature=1, seed=seed, draft_sampling="coupled",
            ignore_eos=True,
        )
        for seed in range(num_prompts)
    ]  # fmt: skip
    return [greedy] * num_prompts + warm


def _generate(
    llm: LLM, prompts: Sequence[str], num_tokens: int
) -> tuple[list[RequestOutput], float]:
    warm_up = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    llm.generate(prompts[0], warm_up)
    begin = time.perf_counter()
    outputs = llm.generate([*prompts, *prompts], _params(len(prompts), num_tokens))
    seconds = time.perf_counter() - begin
    assert isinstance(outputs, list)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs, seconds


def _difference(index: int, plain: RequestOutput, drafted: RequestOutput) -> str | None:
    place = first_difference(plain.token_ids, drafted.token_ids)
    if place is None:
        return None
    return (
        f"text {index}: token {place} of {len(plain.token_ids)} differs: plain "
        f"{plain.token_ids[place : place + 4]}, speculative {drafted.token_ids[place : place + 4]}"
    )


def describe_model(llm: LLM) -> str:
    """One line: architecture, size, types, and how much context it is run with."""
    engine = llm.engine
    config, target = engine.model_config, engine.runner.target
    num_parameters = sum(parameter.numel() for parameter in target.parameters())
    linear = sum(kind == "linear_attention" for kind in config.layer_types)
    layers = f"{config.num_layers} layers" + (f" ({linear} linear attention)" if linear else "")
    dtype = str(next(target.parameters()).dtype).removeprefix("torch.")
    mtp = ", MTP head" if config.num_mtp_layers else ""
    return (
        f"{config.model_type}, {num_parameters / 1e6:.1f} M parameters, {layers}{mtp}, "
        f"vocabulary {config.vocab_size}, {dtype}, up to {engine.max_model_len} tokens"
    )


def print_report(report: CheckReport, stream: TextIO) -> None:
    """Say what was found, for a person."""
    if report.error is not None:
        print(harmless(f"could not run: {report.error}"), file=stream)
        return
    stats = report.speculation
    print(f"model        {report.model}", file=stream)
    print(f"compared     {report.num_texts} texts, {report.num_tokens} tokens", file=stream)
    length = stats.acceptance_length
    if length is not None:
        rates = [count / stats.num_rounds for count in stats.accepted_per_position]
        shown = " ".join(f"{rate:.2f}" for rate in rates)
        print(f"acceptance   {length:.2f} tokens a round; by position {shown}", file=stream)
    else:
        print("acceptance   no draft was verified", file=stream)
    print(f"passes       {report.plain_passes} plain, {stats.num_passes} speculative", file=stream)
    plain, drafted = report.seconds
    print(f"time         {plain:.2f} s plain, {drafted:.2f} s speculative", file=stream)
    for line in report.mismatches:
        print(f"DIFFERENT    {line}", file=stream)
    verdict = "identical" if report.result is CheckResult.RIGHT else "NOT identical"
    print(f"texts are    {verdict}", file=stream)
