"""EAGLE3 drafts what a plain implementation of its formulas drafts, and loads only what fits."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.config import EngineConfig
from outrider.engine import Engine
from outrider.errors import CheckpointError, ConfigError
from outrider.layers.norm import RMSNorm
from outrider.layers.rows import LayerCache, RowBatch
from outrider.models.config import ModelConfig
from outrider.models.eagle3_config import Eagle3Config
from outrider.output import total_speculation
from outrider.params import SamplingParams
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import Proposal
from outrider.spec.eagle3 import Eagle3Drafter
from outrider.tokenizer import Tokenizer
from tests.checkpoints import SHAPES, write_qwen3_5
from tests.checkpoints_qwen3 import QWEN3_SHAPES, Qwen3Shape, eagle3_weights, write_eagle3
from tests.harness import (
    make_engine,
    random_tokens,
    run_requests,
    tokens_of,
    transformers_model,
    watch_slots,
)
from tests.trained import Folders, trained_pair

Tensors = dict[str, Tensor]

TOLERANCE = 1e-4
"""Of the largest entry of a hidden state; float32, summed in another order."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


@cache
@torch.inference_mode()
def residual_streams(target: Path, text: tuple[int, ...]) -> list[Tensor]:
    """Entry i [L, H] enters layer i of the target."""
    output = transformers_model(target)(input_ids=torch.tensor([text]), output_hidden_states=True)
    return [hidden[0] for hidden in output.hidden_states]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class Plain:
    """The draft in the folder `path` for a target, reading the streams that enter `taps`.

    Names and shapes come from the tensors; numbers that they do not tell come from `config`.
    """

    path: Path
    target: Path
    taps: tuple[int, ...]
    weights: Tensors = field(init=False, hash=False)
    config: dict[str, Any] = field(init=False, hash=False)
    embedding: Tensor = field(init=False, hash=False)

    def __post_init__(self) -> None:
        weights = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(self.path / "model.safetensors").items()
        }
        config = json.loads((self.path / "config.json").read_text())
        own = weights.get("embed_tokens.weight")
        shared = transformers_model(self.target).get_input_embeddings().weight.detach()
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "embedding", shared if own is None else own)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def rotated(self, heads: Tensor) -> Tensor:
        """[L, heads, D] at positions 0 .. L - 1: dimensions i and i + D/2 turn together."""
        length, _, size = heads.shape
        speeds = [self.config["rope_theta"] ** (-2 * i / size) for i in range(size // 2)]
        angles = torch.outer(
            torch.arange(length, dtype=torch.float64), torch.tensor(speeds, dtype=torch.float64)
        ).float()[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ),
            dim=-1,
        )

    def attention(self, x: Tensor) -> Tensor:
        """[L, 2 H] -> [L, H]."""
        length, num_heads = len(x), self.config["num_attention_heads"]
        num_kv_heads = self.config["num_key_value_heads"]
        prefix = "midlayer.self_attn."
        queries = self.rotated(self.linear(x, prefix + "q_proj").view(length, num_heads, -1))
        keys = self.rotated(self.linear(x, prefix + "k_proj").view(length, num_kv_heads, -1))
        values = self.linear(x, prefix + "v_proj").view(length, num_kv_heads, -1)
        later = torch.ones(length, length).triu(1).bool()
        outputs: list[Tensor] = []
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            scores = queries[:, head] @ keys[:, group].T / queries.shape[-1] ** 0.5
            scores = scores.masked_fill(later, float("-inf"))
            outputs.append(torch.softmax(scores, dim=-1) @ values[:, group])
        return self.linear(torch.cat(outputs, dim=-1), prefix + "o_proj")

    def projected(self, text: Sequence[int], whole: tuple[int, ...]) -> Tensor:
        """g at every position of a text; `whole` begins with it and is run by the target once."""
        streams = residual_streams(self.target, whole)
        parts = [streams[layer][: len(text)] for layer in self.taps]
        if self.config.get("fc_norm"):
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        joined = torch.cat(parts, dim=-1)
        if self.config.get("norm_before_fc"):
            joined = self.norm(joined, "input_norm")
        return self.linear(joined, "fc")

    def outputs(self, g: Tensor, next_ids: Sequence[int]) -> Tensor:
        """Pairs (g_t, x_{t+1}) -> what is recycled [L, H]."""
        embedded = self.norm(self.embedding[list(next_ids)], "midlayer.input_layernorm")
        normed = self.norm(g, "midlayer.hidden_norm")
        residual = normed if self.config.get("norm_before_residual") else g
        x = residual + self.attention(torch.cat((embedded, normed), dim=-1))
        h = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = self.linear(h, "midlayer.mlp.gate_proj"), self.linear(h, "midlayer.mlp.up_proj")
        x = x + self.linear(gate / (1 + torch.exp(-gate)) * up, "midlayer.mlp.down_proj")
        return self.norm(x, "norm") if self.config.get("norm_output") else x

    def draft(self, hidden: Tensor) -> int:
        """Target id of the likeliest token."""
        normed = hidden if self.config.get("norm_output") else self.norm(hidden, "norm")
        index = int(self.linear(normed, "lm_head").argmax())
        return index + int(self.weights["d2t"][index]) if "d2t" in self.weights else index

    @torch.inference_mode()
    def chain(
        self, text: Sequence[int], num_drafts: int, whole: tuple[int, ...]
    ) -> tuple[Tensor, list[int]]:
        """Hidden states [k, H] and token ids of the chain that follows a text."""
        g, next_ids = self.projected(text, whole)[:-1], list(text[1:])
        states: list[Tensor] = []
        for _ in range(num_drafts):
            states.append(self.outputs(g, next_ids)[-1])
            next_ids.append(self.draft(states[-1]))
            g = torch.cat((g, states[-1][None]))
        return torch.stack(states), next_ids[len(text) - 1 :]


@dataclass
class Seen:
    """One sequence's proposal: chain hidden states [k, H] and token ids [k], after n tokens."""

    sequence_id: int
    num_committed: int
    hidden: Tensor
    token_ids: list[int]


@dataclass
class Watched(Drafter):
    """Runs the real draft and notes its proposals; hands on tokens that a script chooses.

    The script knows the text to come, so that rounds are accepted in part, and the draft's cache
    has been written over by chains that were refused.
    """

    real: Eagle3Drafter
    texts: dict[int, list[int]]
    sequence_in_slot: dict[int, int] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    samples = False

    def __post_init__(self) -> None:
        self.taps, self.cache_specs = self.real.taps, self.real.cache_specs

    def bind(self, caches: tuple[LayerCache, ...]) -> None:
        self.real.bind(caches)

    def feed(self, tapped: Tensor, next_token_ids: Tensor, rows: RowBatch) -> Tensor:
        return self.real.feed(tapped, next_token_ids, rows)

    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        chain, step = [hidden], self.real.step

        def noted(*args: Any) -> Tensor:
            chain.append(step(*args))
            return chain[-1]

        self.real.step = noted  # type: ignore[method-assign]
        try:
            proposal = self.real.propose(hidden, frontier)
        finally:
            self.real.step = step  # type: ignore[method-assign]
        handed_on = torch.zeros_like(proposal.token_ids)
        slots = frontier.rows_at(2).groups[0].slots.tolist()
        for row, (slot, n) in enumerate(zip(slots, frontier.num_committed.tolist(), strict=True)):
            sequence_id, wanted = self.sequence_in_slot[slot], int(frontier.num_wanted[row])
            states = torch.stack([h[row] for h in chain[:wanted]])
            drafts = proposal.token_ids[row, :wanted].tolist()
            self.seen.append(Seen(sequence_id, n, states, drafts))
            coin = random.Random(f"{sequence_id} {n}")
            for index in range(wanted):
                right = self.texts[sequence_id][n + index]
                handed_on[row, index] = right if coin.random() < 0.7 else right ^ 1
        return Proposal(handed_on, frontier.num_wanted, None)


NUM_TOKENS = 26
"""Output tokens that scripts know: 7, then a round that emits 9, then 8 drafts, and some."""


@cache
def greedy_texts(target: Path, vocab_size: int, lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """Prompts of these lengths with what the target writes after them."""
    prompts = [random_tokens(n, vocab_size, n) for n in lengths]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outputs = run_requests(make_engine(target, dtype="float32"), prompts, params)
    return {i: [*prompts[i], *output.token_ids] for i, output in enumerate(outputs)}


def check_chains(
    target: Path,
    draft: Path,
    taps: tuple[int, ...],
    num_drafts: int,
    vocab_size: int,
    lengths: Sequence[int] = (1, 19, 12),
) -> None:
    """Run prompts for some rounds of partial acceptance and compare every proposal."""
    prompts = [random_tokens(n, vocab_size, n) for n in lengths]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    caps = [None, None, max(num_drafts - 1, 1)]
    each = [replace(params, max_draft_tokens=cap) for cap in caps[: len(prompts)]]
    texts = greedy_texts(target, vocab_size, tuple(lengths))
    engine = make_engine(target, num_drafts, method="eagle3", draft=draft, dtype="float32")
    real = engine.runner.drafter
    assert isinstance(real, Eagle3Drafter)
    engine.runner.drafter = watched = Watched(real, texts)
    watch_slots(engine, watched.sequence_in_slot)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, each[index])
    num_decoded = 0
    while num_decoded < 8:
        engine.step()
        gained = (s.num_committed - len(prompts[s.sequence_id]) for s in watched.seen)
        num_decoded = max(gained, default=0)
    assert len(watched.seen) >= 6
    plain = Plain(draft, target, taps)
    for seen in watched.seen:
        text = texts[seen.sequence_id]
        states, drafts = plain.chain(text[: seen.num_committed], len(seen.token_ids), tuple(text))
        assert seen.token_ids == drafts
        scale = max(states.abs().max().item(), 1.0)
        assert (seen.hidden - states).abs().max() <= TOLERANCE * scale


USUAL = {8: (2, 4, 5), 9: (2, 4, 6)}
"""Tapped layers by the target's number of layers: 2, n // 2 and n - 3."""


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_chains_equal_a_plain_implementation_after_rounds_of_partial_acceptance(
    folders: Folders, num_drafts: int
) -> None:
    own_embedding = num_drafts % 2 == 0
    shape = QWEN3_SHAPES[4] if own_embedding else QWEN3_SHAPES[0]
    draft = folders.draft(shape, own_embedding=own_embedding)
    taps = USUAL[shape.num_layers]
    check_chains(folders.target(shape), draft, taps, num_drafts, shape.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("shape", QWEN3_SHAPES, ids=lambda shape: shape.label)
def test_chains_equal_a_plain_implementation_for_every_shape_of_target(
    folders: Folders, shape: Qwen3Shape, num_drafts: int, own_embedding: bool
) -> None:
    draft = folders.draft(shape, own_embedding=own_embedding)
    taps, lengths = USUAL[shape.num_layers], (1, 90, 12)
    check_chains(folders.target(shape), draft, taps, num_drafts, shape.vocab_size, lengths)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COMBINED = (
    *((flag,) for flag in FLAGS),
    ("norm_before_residual", "norm_before_fc", "norm_output"),
    ("norm_before_residual", "fc_norm", "norm_output"),
)


def with_norms(tensors: Tensors, flags: Sequence[str], size: int) -> Tensors:
    """Random weights for the norms that the flags bring; `size` is the target's hidden size."""
    generator = torch.Generator().manual_seed(9)

    def weight(width: int) -> Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    if "norm_before_fc" in flags:
        tensors = {**tensors, "input_norm.weight": weight(3 * size)}
    if "fc_norm" in flags:
        tensors = {**tensors, **{f"fc_norm.{i}.weight": weight(size) for i in range(3)}}
    return tensors


@pytest.mark.parametrize("flags", COMBINED, ids="+".join)
def test_every_variant_of_the_network_equals_the_plain_implementation(
    folders: Folders, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    shape = QWEN3_SHAPES[0]
    tensors = with_norms(eagle3_weights(shape, 40, 0), flags, shape.hidden_size)
    write_eagle3(tmp_path, shape, tensors=tensors, **dict.fromkeys(flags, True))
    check_chains(folders.target(shape), tmp_path, USUAL[8], 4, shape.vocab_size)


@pytest.mark.parametrize("flags", COMBINED, ids="+".join)
def test_a_variant_of_the_network_moves_its_drafts(
    folders: Folders, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    # Else the comparison with the plain implementation would prove nothing of the flags.
    shape = QWEN3_SHAPES[0]
    tensors = with_norms(eagle3_weights(shape, 40, 0), flags, shape.hidden_size)
    write_eagle3(tmp_path, shape, tensors=tensors, **dict.fromkeys(flags, True))
    target = folders.target(shape)
    assert drafts_of(target, tmp_path) != drafts_of(target, folders.draft(shape))


def test_a_draft_whose_vocabulary_is_the_targets_needs_no_map(folders: Folders) -> None:
    shape = QWEN3_SHAPES[2]
    draft = folders.draft(shape, shape.vocab_size)
    assert "d2t" not in load_file(draft / "model.safetensors")
    check_chains(folders.target(shape), draft, USUAL[8], 4, shape.vocab_size)


def test_a_draft_of_another_width_than_the_targets_brings_its_own_embedding(
    folders: Folders, tmp_path: Path
) -> None:
    shape = QWEN3_SHAPES[0]
    write_eagle3(tmp_path, narrow(shape), tensors=narrow_weights(shape, own_embedding=True))
    check_chains(folders.target(shape), tmp_path, USUAL[8], 3, shape.vocab_size)


def narrow(shape: Qwen3Shape) -> Qwen3Shape:
    return replace(shape, hidden_size=shape.hidden_size // 2)


def narrow_weights(shape: Qwen3Shape, *, own_embedding: bool) -> Tensors:
    """A draft of half the target's width that reads the target's streams."""
    small = narrow(shape)
    tensors = eagle3_weights(small, 40, 3, own_embedding=own_embedding)
    generator = torch.Generator().manual_seed(4)
    size = (small.hidden_size, 3 * shape.hidden_size)
    return {**tensors, "fc.weight": 0.15 * torch.randn(size, generator=generator)}


def test_the_trained_draft_equals_the_plain_implementation() -> None:
    target, draft = trained_pair()
    config = json.loads((target / "config.json").read_text())
    n = config["num_hidden_layers"]
    plain_config = json.loads((draft / "config.json").read_text())
    assert "transformer_layer_config" not in plain_config
    check_chains(target, draft, (2, n // 2, n - 3), 4, config["vocab_size"])


PROMPTS = (
    "def main():\n    parser = argparse.ArgumentParser()\n",
    "class TestCase(unittest.TestCase):\n    def test_",
    "The following options are available:\n",
    "    for key, value in items.items():\n        if",
)


def reverse_the_taps(drafter: Eagle3Drafter) -> None:
    weight = drafter._draft.fc.weight
    weight.data = torch.cat(weight.data.chunk(3, dim=1)[::-1], dim=1)


def put_the_hidden_state_first(drafter: Eagle3Drafter) -> None:
    weight = drafter._draft.midlayer.self_attn.qkv_proj.weight
    weight.data = torch.cat(weight.data.chunk(2, dim=1)[::-1], dim=1)


def take_draft_ids_for_target_ids(drafter: Eagle3Drafter) -> None:
    assert drafter._target_ids is not None
    drafter._target_ids = torch.arange(len(drafter._target_ids))


def centre_the_norms_on_zero(drafter: Eagle3Drafter) -> None:
    for module in drafter._draft.modules():
        if isinstance(module, RMSNorm):
            module.config = replace(module.config, zero_centred=True)


WRONG = (
    reverse_the_taps,
    put_the_hidden_state_first,
    take_draft_ids_for_target_ids,
    centre_the_norms_on_zero,
)


def measure(change: Callable[[Eagle3Drafter], None] | None) -> tuple[float, list[tuple[int, ...]]]:
    """Acceptance length at k = 3 and temperature 0 on a few prompts, and the texts."""
    target, draft = trained_pair()
    tokenizer = Tokenizer.from_pretrained(target)
    engine = make_engine(target, 3, method="eagle3", draft=draft)
    drafter = engine.runner.drafter
    assert isinstance(drafter, Eagle3Drafter)
    if change is not None:
        change(drafter)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    outputs = run_requests(engine, [tokenizer.encode(prompt) for prompt in PROMPTS], params)
    length = total_speculation(outputs).acceptance_length
    assert length is not None
    return length, tokens_of(outputs)


@pytest.fixture(scope="module")
def right() -> tuple[float, list[tuple[int, ...]]]:
    return measure(None)


def test_the_trained_draft_is_mostly_right(right: tuple[float, list[tuple[int, ...]]]) -> None:
    assert right[0] > 2.0


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_acceptance_collapses_when_the_mathematics_is_wrong_and_the_text_stays(
    right: tuple[float, list[tuple[int, ...]]], change: Callable[[Eagle3Drafter], None]
) -> None:
    length, texts = measure(change)
    assert texts == right[1]
    assert length < right[0] - 0.4, (length, right[0])


@cache
def drafts_of(target: Path, draft: Path) -> list[tuple[int, ...]]:
    """Everything that was proposed for a greedy request, round by round."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    engine = make_engine(target, 4, method="eagle3", draft=draft)
    [output] = run_requests(engine, [(5, 9, 3, 77, 20)], params)
    return [round_.draft_token_ids for round_ in output.rounds]


@pytest.mark.parametrize("grid", [1, 5, 64])
def test_chunks_of_a_prompt_feed_the_draft_without_holes(folders: Folders, grid: int) -> None:
    shape = QWEN3_SHAPES[0]
    target, draft = folders.target(shape), folders.draft(shape)
    prompt = random_tokens(23, shape.vocab_size, 0)
    engine = make_engine(
        target, 4, method="eagle3", draft=draft, prefill_grid=grid, max_prefill_tokens=grid
    )
    engine.add_request("0", prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    outputs = []
    while not outputs:
        outputs = engine.step()
    text = [*prompt, *outputs[0].token_ids]
    _, expected = Plain(draft, target, USUAL[8]).chain(text, 4, tuple(text))
    assert engine.scheduler.sequence(0).proposed_token_ids == tuple(expected)


def test_the_text_is_the_targets_own_whatever_the_draft_says(folders: Folders) -> None:
    shape = QWEN3_SHAPES[1]
    target, draft = folders.target(shape), folders.draft(shape)
    prompts = [random_tokens(n, shape.vocab_size, n) for n in (1, 33, 70)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    plain = tokens_of(run_requests(make_engine(target), prompts, params))
    engine = make_engine(target, 5, method="eagle3", draft=draft)
    assert tokens_of(run_requests(engine, prompts, params)) == plain


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("prefixed", [False, True])
def test_all_layouts_of_the_same_weights_give_identical_drafts(
    folders: Folders, tmp_path: Path, own_embedding: bool, speculators: bool, prefixed: bool
) -> None:
    shape = QWEN3_SHAPES[0]
    target = folders.target(shape)
    usual = drafts_of(target, folders.draft(shape, own_embedding=own_embedding))
    write_eagle3(tmp_path, shape, own_embedding=own_embedding, speculators=speculators)
    if prefixed:
        tensors = load_file(tmp_path / "model.safetensors")
        kept = ("lm_head.weight", "d2t", "t2d")
        renamed = {n if n in kept else f"model.{n}": tensor for n, tensor in tensors.items()}
        save_file(renamed, tmp_path / "model.safetensors")
    assert drafts_of(target, tmp_path) == usual
    assert len(set(usual)) > 3


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("section", [None, "transformer_layer_config", "eagle_config"])
def test_a_flag_is_found_wherever_the_tools_write_it(
    folders: Folders, tmp_path: Path, speculators: bool, section: str | None
) -> None:
    shape, draft = QWEN3_SHAPES[0], tmp_path
    write_eagle3(draft, shape, speculators=speculators)
    config = json.loads((draft / "config.json").read_text())
    place = config if section is None else config.setdefault(section, {})
    if section == "transformer_layer_config" and not speculators:
        config[section] = place = {key: config[key] for key in config if key != "architectures"}
    place["norm_output"] = True
    (draft / "config.json").write_text(json.dumps(config))
    read = Eagle3Config.from_hf(draft, ModelConfig.from_hf(folders.target(shape)), 4 * 32)
    assert read.norm_output and not read.norm_before_residual


def deep_target(num_layers: int) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "qwen3",
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
        }
    )


KEY = "eagle_aux_hidden_state_layer_ids"

CONVENTIONS: Mapping[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "nothing is said": (36, {}, (2, 18, 33)),
    "nothing is said, odd": (9, {}, (2, 4, 6)),
    "layers entered": (94, {KEY: [2, 47, 91]}, (2, 47, 91)),
    "layers whose output is meant": (94, {KEY: [1, 46, 90]}, (2, 47, 91)),
    "eagle_config, outputs": (94, {"eagle_config": {KEY: [1, 46, 90]}}, (2, 47, 91)),
    "eagle_config, entered": (94, {"eagle_config": {KEY: [2, 47, 91]}}, (2, 47, 91)),
    "others, entered": (36, {KEY: [3, 10, 30]}, (3, 10, 30)),
    "others in eagle_config, outputs": (36, {"eagle_config": {KEY: [3, 10, 30]}}, (4, 11, 31)),
    "eagle_config without ids": (36, {"eagle_config": {"use_aux": True}}, (2, 18, 33)),
    "eagle_config goes first": (36, {KEY: [3, 4, 5], "eagle_config": {KEY: [6, 7, 8]}}, (7, 8, 9)),
    "the first layer": (36, {KEY: [0, 1, 2]}, (0, 1, 2)),
    "two taps": (36, {KEY: [5, 35]}, (5, 35)),
}


@pytest.mark.parametrize("name", list(CONVENTIONS))
@pytest.mark.parametrize("speculators", [False, True])
def test_ids_of_taps_are_read_in_both_conventions(
    tmp_path: Path, name: str, speculators: bool
) -> None:
    num_layers, extra, taps = CONVENTIONS[name]
    write_eagle3(tmp_path, QWEN3_SHAPES[0], speculators=speculators, **extra)
    config = Eagle3Config.from_hf(tmp_path, deep_target(num_layers), 4 * 32)
    assert config.tapped_layers == taps


@pytest.mark.parametrize(
    "extra",
    [
        {KEY: [2, 4, 6]},
        {KEY: [1, 3, 5]},
        {"eagle_config": {KEY: [1, 3, 5]}},
        {"eagle_config": {KEY: [2, 4, 6]}},
    ],
)
def test_drafts_do_not_depend_on_how_the_taps_are_spelled(
    folders: Folders, extra: dict[str, Any]
) -> None:
    shape = QWEN3_SHAPES[4]
    target = folders.target(shape)
    expected = drafts_of(target, folders.draft(shape))
    assert drafts_of(target, folders.draft(shape, **extra)) == expected
    assert drafts_of(target, folders.draft(shape, **{KEY: [3, 5, 7]})) != expected


@pytest.mark.parametrize(
    "extra",
    [{KEY: [0, 3, 7]}, {"eagle_config": {KEY: [0, 3, 6]}}],
    ids=["entered", "outputs"],
)
def test_unusual_taps_equal_the_plain_implementation(
    folders: Folders, extra: dict[str, Any]
) -> None:
    shape = QWEN3_SHAPES[0]
    taps = (0, 3, 7) if KEY in extra else (1, 4, 7)
    draft = folders.draft(shape, **extra)
    check_chains(folders.target(shape), draft, taps, 3, shape.vocab_size)


@pytest.mark.parametrize("head_dim", [None, 16, 64])
@pytest.mark.parametrize("speculators", [False, True])
def test_a_head_dim_that_is_missing_or_wrong_is_taken_from_the_weights(
    folders: Folders,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    head_dim: int | None,
    speculators: bool,
) -> None:
    shape = QWEN3_SHAPES[0]  # 4 heads of 32 dimensions, which is twice the hidden size of 64
    write_eagle3(tmp_path, shape, speculators=speculators)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config["transformer_layer_config"] if speculators else config
    layer["head_dim"] = head_dim
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = folders.target(shape)
    with caplog.at_level(logging.WARNING, "outrider"):
        drafts = drafts_of(target, tmp_path)
    assert drafts == drafts_of(target, folders.draft(shape))
    told = [record.getMessage() for record in caplog.records if "head_dim" in record.getMessage()]
    assert len(told) == (0 if head_dim is None else 1)
    assert all(f"is {head_dim}, but the weights have 32" in message for message in told)


def test_fewer_positions_than_the_targets_are_warned_of_once_and_drafted_past(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    shape = QWEN3_SHAPES[0]
    target, draft = folders.target(shape), folders.draft(shape, max_position_embeddings=16)
    prompts = [random_tokens(n, shape.vocab_size, n) for n in (12, 40)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "outrider"):
        engine = make_engine(target, 3, method="eagle3", draft=draft)
        outputs = run_requests(engine, prompts, params)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "trained for 16 positions and the target for 1024" in warnings[0]
    long = make_engine(target, 3, method="eagle3", draft=folders.draft(shape))
    expected = run_requests(long, prompts, params)
    assert [o.rounds for o in outputs] == [o.rounds for o in expected]
    check_chains(target, draft, USUAL[8], 3, shape.vocab_size, (12, 40, 15))


def test_as_many_positions_as_the_targets_are_no_reason_for_a_warning(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    shape = QWEN3_SHAPES[0]
    with caplog.at_level(logging.WARNING, "outrider"):
        drafts_of(folders.target(shape), folders.draft(shape))
    assert not caplog.records


def engine_for(target: Path, draft: Path) -> Engine:
    return make_engine(target, 3, method="eagle3", draft=draft)


def refusal_of(target: Path, draft: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        engine_for(target, draft)
    return str(caught.value)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def offset(index: int, target_id: int) -> Callable[[Tensor], Tensor]:
    """Make draft id `index` mean `target_id`."""

    def change(d2t: Tensor) -> Tensor:
        d2t = d2t.clone()
        d2t[index] = target_id - index
        return d2t

    return change


def repeated(d2t: Tensor) -> Tensor:
    """Draft ids 0 and 1 mean the same token."""
    return offset(1, int(d2t[0]))(d2t)


def second_layer(tensors: Tensors) -> Tensors:
    extra = {n.replace("midlayer.", "layers.1."): t for n, t in tensors.items() if "midlayer" in n}
    return {**tensors, **{n: t.clone() for n, t in extra.items()}}


def flip(index: int) -> Callable[[Tensor], Tensor]:
    return lambda t2d: t2d ^ (torch.arange(len(t2d)) == index)


ODD = "midlayer.mlp.up_proj.weight"

WRONG_TENSORS: Mapping[str, tuple[Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "no d2t": (without("d2t", "t2d"), ("d2t is missing", "draft_vocab_size 40", "128")),
    "no d2t but t2d": (without("d2t"), ("d2t is missing",)),
    "id past the end": (put("d2t", offset(39, 128)), ("d2t: target ids", "128", "0 to 127")),
    "negative id": (put("d2t", offset(0, -1)), ("d2t: target ids", "from -1", "0 to 127")),
    "repeated ids": (put("d2t", repeated), ("d2t: target ids", "repeated")),
    "d2t too short": (put("d2t", lambda t: t[:39]), ("d2t: shape", "[39]", "[40]")),
    "t2d names one more": (put("t2d", lambda t: t | True), ("d2t and t2d", "128 ids in t2d")),
    "t2d names others": (put("t2d", lambda t: t.roll(1)), ("d2t and t2d", "40 ids in t2d")),
    "two layers": (second_layer, ("self_attn.q_proj.weight", "layers.1.", "one")),
    "no layer": (
        lambda ts: {n: t for n, t in ts.items() if "midlayer" not in n},
        ("self_attn.q_proj.weight", "one"),
    ),
    "no fc": (without("fc.weight"), ("missing tensors: fc.weight",)),
    "no head": (without("lm_head.weight"), ("missing tensors: lm_head.weight",)),
    "no norm": (without("norm.weight"), ("missing tensors: norm.weight",)),
    "no hidden_norm": (
        without("midlayer.hidden_norm.weight"),
        ("missing tensors: midlayer.hidden_norm.weight",),
    ),
    "no k_proj": (
        without("midlayer.self_attn.k_proj.weight"),
        ("missing tensors: midlayer.self_attn.k_proj.weight",),
    ),
    "a tensor too many": (
        lambda ts: {**ts, "midlayer.self_attn.q_proj.bias": torch.zeros(128)},
        ("unexpected tensors: midlayer.self_attn.q_proj.bias",),
    ),
    "a prefixed tensor too many": (
        lambda ts: {**ts, "model.gate.weight": torch.zeros(3)},
        ("unexpected tensors: model.gate.weight",),
    ),
    "a norm that no flag asks for": (
        lambda ts: with_norms(ts, ("norm_before_fc",), 64),
        ("unexpected tensors: input_norm.weight",),
    ),
    "wrong shape": (put(ODD, lambda t: t[:, :-1]), (ODD, "[128, 63]", "[128, 64]")),
    "taps of another target": (
        put("fc.weight", lambda t: t[:, : 2 * 64]),
        ("fc.weight", "[64, 128]", "[64, 192]"),
    ),
    "head of another size": (
        put("lm_head.weight", lambda t: t[:39]),
        ("lm_head.weight", "[39, 64]", "[40, 64]"),
    ),
    "whole numbers for weights": (
        put(ODD, lambda t: t.to(torch.int8)),
        (ODD, "int8"),
    ),
}


@pytest.mark.parametrize("name", list(WRONG_TENSORS))
@pytest.mark.parametrize("speculators", [False, True])
def test_wrong_tensors_are_load_errors_that_name_them(
    folders: Folders, tmp_path: Path, name: str, speculators: bool
) -> None:
    change, told = WRONG_TENSORS[name]
    shape = QWEN3_SHAPES[0]
    write_eagle3(
        tmp_path, shape, tensors=change(eagle3_weights(shape, 40, 0)), speculators=speculators
    )
    message = refusal_of(folders.target(shape), tmp_path)
    for part in told:
        # Names are those of the checkpoint; missing ones are those of the module.
        spelled = part.replace("midlayer.", "layers.0.") if speculators else part
        assert part in message or spelled in message, message


def test_t2d_may_be_left_out(folders: Folders, tmp_path: Path) -> None:
    shape = QWEN3_SHAPES[0]
    write_eagle3(tmp_path, shape, tensors=without("t2d")(eagle3_weights(shape, 40, 0)))
    target = folders.target(shape)
    assert drafts_of(target, tmp_path) == drafts_of(target, folders.draft(shape))


WRONG_FIELDS: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two layers": ({"num_hidden_layers": 2}, ("num_hidden_layers", "got 2", "1")),
    "other vocabulary": ({"vocab_size": 129}, ("vocab_size", "got 129", "128, the target's")),
    "no heads": ({"num_attention_heads": None}, ("num_attention_heads is missing",)),
    "heads that do not divide": (
        {"num_attention_heads": 3},
        ("num_attention_heads", "got 3", "128"),
    ),
    "no hidden size": ({"hidden_size": None}, ("hidden_size is missing",)),
    "no intermediate size": ({"intermediate_size": None}, ("intermediate_size is missing",)),
    "no rope_theta": ({"rope_theta": None}, ("rope_theta is missing",)),
    "sliding windows": ({"use_sliding_window": True}, ("use_sliding_window", "got True")),
    "a sliding layer": (
        {"layer_types": ["sliding_attention"]},
        ("layer_types", "sliding_attention", "full_attention"),
    ),
    "another activation": ({"hidden_act": "gelu"}, ("hidden_act", "got 'gelu'", "silu")),
    "another rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope type", "linear")),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "fp8")),
    "a flag that is no flag": (
        {"norm_output": "yes"},
        ("norm_output", "got 'yes'", "true or false"),
    ),
    "norms that are not there": (
        {"fc_norm": True},
        ("missing tensors: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight",),
    ),
    "norm that is not there": ({"norm_before_fc": True}, ("missing tensors: input_norm.weight",)),
    "taps not ascending": ({KEY: [4, 2, 5]}, (KEY, "ascending", "[4, 2, 5]")),
    "taps repeated": ({KEY: [2, 2, 5]}, (KEY, "distinct")),
    "taps past the end": ({KEY: [2, 4, 8]}, (KEY, "[2, 4, 8]", "layers 0 to 7")),
    "outputs past the end": (
        {"eagle_config": {KEY: [2, 3, 7]}},
        ("eagle_config", KEY, "[3, 4, 8]"),
    ),
    "negative taps": ({KEY: [-1, 2, 5]}, (KEY, "layers 0 to 7")),
    "no taps": ({KEY: []}, (KEY, "a list of ids")),
    "taps that are no list": ({KEY: "2,4,5"}, (KEY, "a list of ids")),
    "taps that are no ids": ({KEY: [2, True, 5]}, (KEY, "a list of ids")),
    "fewer taps than the weights have": ({KEY: [2, 5]}, ("fc.weight", "[64, 192]", "[64, 128]")),
    "draft vocabulary of no tensor": ({"draft_vocab_size": 41}, ("lm_head.weight", "[40, 64]")),
}


@pytest.mark.parametrize("name", list(WRONG_FIELDS))
@pytest.mark.parametrize("speculators", [False, True])
def test_wrong_fields_are_load_errors_that_name_them(
    folders: Folders, tmp_path: Path, name: str, speculators: bool
) -> None:
    change, told = WRONG_FIELDS[name]
    shape = QWEN3_SHAPES[0]
    write_eagle3(tmp_path, shape, speculators=speculators)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config["transformer_layer_config"] if speculators else config
    of_the_top = {"draft_vocab_size", KEY, "eagle_config"}
    for key, value in change.items():
        (config if key in of_the_top else layer)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal_of(folders.target(shape), tmp_path)
    for part in told:
        assert part in message, message


def test_a_narrower_draft_without_its_own_embedding_is_refused(
    folders: Folders, tmp_path: Path
) -> None:
    shape = QWEN3_SHAPES[0]
    write_eagle3(tmp_path, narrow(shape), tensors=narrow_weights(shape, own_embedding=False))
    message = refusal_of(folders.target(shape), tmp_path)
    assert "embed_tokens.weight is missing" in message
    assert "got 64" in message and "hidden_size 32" in message


@pytest.mark.parametrize("num_layers", [3, 5, 6])
def test_a_target_too_shallow_for_the_usual_taps_is_refused(
    folders: Folders, num_layers: int
) -> None:
    shape = replace(QWEN3_SHAPES[0], num_layers=num_layers)
    message = refusal_of(folders.target(shape), folders.draft(shape))
    assert KEY in message and f"{num_layers} layers is too shallow" in message


def test_a_shallow_target_can_be_tapped_where_the_draft_says_so(folders: Folders) -> None:
    shape = replace(QWEN3_SHAPES[0], num_layers=3)
    draft = folders.draft(shape, **{KEY: [0, 1, 2]})
    check_chains(folders.target(shape), draft, (0, 1, 2), 3, shape.vocab_size)


def test_a_target_that_cannot_be_tapped_is_refused_with_what_it_can_do(
    folders: Folders, tmp_path: Path
) -> None:
    write_qwen3_5(tmp_path, SHAPES[0])
    with pytest.raises(ConfigError) as caught:
        engine_for(tmp_path, folders.draft(QWEN3_SHAPES[0]))
    message = str(caught.value)
    assert "qwen3_5 cannot host speculative method eagle3" in message
    assert "cannot be tapped" in message
    assert caught.value.allowed == "mtp, ngram"


def test_a_draft_without_weights_or_config_is_refused(folders: Folders, tmp_path: Path) -> None:
    shape = QWEN3_SHAPES[0]
    target = folders.target(shape)
    assert "no safetensors file" in refusal_of(target, tmp_path)
    write_eagle3(tmp_path, shape)
    (tmp_path / "config.json").unlink()
    assert "config.json is missing" in refusal_of(target, tmp_path)


def test_half_precision_targets_take_the_draft_along(folders: Folders) -> None:
    shape = QWEN3_SHAPES[0]
    engine = make_engine(
        folders.target(shape), 3, method="eagle3", draft=folders.draft(shape), dtype="bfloat16"
    )
    drafter = engine.runner.drafter
    assert isinstance(drafter, Eagle3Drafter)
    assert {p.dtype for p in drafter._draft.parameters()} == {torch.bfloat16}
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    prompts = [random_tokens(n, shape.vocab_size, n) for n in (1, 33)]
    plain = make_engine(folders.target(shape), dtype="bfloat16")
    expected = tokens_of(run_requests(plain, prompts, params))
    assert tokens_of(run_requests(engine, prompts, params)) == expected
    assert isinstance(engine.config, EngineConfig)
