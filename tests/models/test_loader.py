"""Weights end up where they belong, exactly once, or an error names what does not fit."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.models.loader import (
    WeightFiles,
    WeightMap,
    check_coverage,
    dummy_weights,
    load_weights,
    prepare_parameters,
)


class Packed(nn.Module):
    """A linear layer whose rows are several checkpoint tensors."""

    def __init__(self, width: int, *part_sizes: int, interleaved: bool = False) -> None:
        super().__init__()
        self.part_sizes = part_sizes
        self.interleaved = interleaved
        self.weight = nn.Parameter(torch.empty(sum(part_sizes), width), requires_grad=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Packed(4, 6, 2, 2)
        self.A_log = nn.Parameter(torch.empty(3), requires_grad=False)
        self.A_log.keep_dtype = True  # type: ignore[attr-defined]


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.empty(4))
        self.norm.weight.dummy_init = "ones"  # type: ignore[attr-defined]
        if not tied:
            self.lm_head = Packed(4, 5)


class Draft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = Packed(8, 4)
        self.layers = nn.ModuleList([Layer()])


PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
TARGET_MAP = WeightMap(("model.language_model.", "model.", ""), (r"^model\.visual\.",), PACKED)
DRAFT_MAP = WeightMap(("mtp.",), (), PACKED)


def layer_tensors(prefix: str, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj.weight": (6, 4),
        "self_attn.k_proj.weight": (2, 4),
        "self_attn.v_proj.weight": (2, 4),
        "A_log": (3,),
    }
    return {prefix + name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def checkpoint(prefix: str = "model.") -> dict[str, Tensor]:
    return {
        f"{prefix}embed_tokens.weight": torch.randn(5, 4, generator=torch.Generator()),
        f"{prefix}norm.weight": torch.arange(4.0),
        **layer_tensors(f"{prefix}layers.0.", 0),
        **layer_tensors(f"{prefix}layers.1.", 1),
    }


def mtp_tensors() -> dict[str, Tensor]:
    return {"mtp.fc.weight": torch.ones(4, 8), **layer_tensors("mtp.layers.0.", 2)}


def files_of(folder: Path, tensors: dict[str, Tensor]) -> WeightFiles:
    save_file(tensors, folder / "model.safetensors")
    return WeightFiles(folder)


def shard(folder: Path, tensors: dict[str, Tensor], index: dict[str, str] | None = None) -> None:
    """Two shards, every other tensor in each, and an index."""
    names = sorted(tensors)
    homes = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for home in sorted(set(homes.values())):
        save_file({n: tensors[n] for n in names if homes[n] == home}, folder / home)
    text = json.dumps({"metadata": {}, "weight_map": homes if index is None else index})
    (folder / "model.safetensors.index.json").write_text(text)


def load(module: nn.Module, files: WeightFiles, weight_map: WeightMap = TARGET_MAP) -> None:
    load_weights(module, files, weight_map, torch.float32, "cpu")


# Files.


def test_names_shapes_types_and_values_come_from_the_file(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}
    files = files_of(tmp_path, tensors)
    assert files.names() == ["a", "b"]
    assert files.shape("b") == (2, 3)
    assert (files.dtype("a"), files.dtype("b")) == (torch.bfloat16, torch.int64)
    assert "a" in files and "c" not in files
    assert torch.equal(files.get("b"), tensors["b"])
    with pytest.raises(CheckpointError, match="tensor c is not in"):
        files.get("c")


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_are_read_with_and_without_an_index(tmp_path: Path, indexed: bool) -> None:
    tensors = checkpoint()
    shard(tmp_path, tensors)
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    files = WeightFiles(tmp_path)
    assert files.names() == sorted(tensors)
    assert all(torch.equal(files.get(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(checkpoint(), file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        WeightFiles(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path, checkpoint())
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors is missing"):
        WeightFiles(tmp_path)


def test_a_tensor_that_is_not_in_its_shard_is_named_with_it(tmp_path: Path) -> None:
    shard(tmp_path, checkpoint(), {"ghost": "model-1-of-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor ghost is not in .*model-1-of-2"):
        WeightFiles(tmp_path)


def test_a_tensor_in_two_loose_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="tensor x is in two files"):
        WeightFiles(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"x": "../y.safetensors"}}']
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        WeightFiles(tmp_path)


# Loading.


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_every_parameter_is_filled_under_each_naming(tmp_path: Path, prefix: str) -> None:
    tensors = checkpoint(prefix)
    model = Model()
    report = load_weights(
        model, files_of(tmp_path, tensors), TARGET_MAP, torch.float32, torch.device("cpu")
    )
    assert report.consumed == set(tensors)
    assert report.skipped == frozenset()
    for index in range(2):
        at = f"{prefix}layers.{index}."
        qkv = torch.cat([tensors[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"])
        assert torch.equal(model.layers[index].self_attn.qkv_proj.weight, qkv)
        assert torch.equal(model.layers[index].A_log, tensors[f"{at}A_log"])
    assert torch.equal(model.embed_tokens.weight, tensors[f"{prefix}embed_tokens.weight"])
    assert torch.equal(model.norm.weight, torch.arange(4.0))


def test_rows_of_interleaved_parts_take_turns(tmp_path: Path) -> None:
    gate, up = torch.arange(6.0).view(3, 2), torch.arange(6.0, 12.0).view(3, 2)
    files = files_of(tmp_path, {"mlp.gate.weight": gate, "mlp.up.weight": up})
    module = nn.Module()
    module.mlp = nn.Module()
    module.mlp.both = Packed(2, 3, 3, interleaved=True)
    load(module, files, WeightMap(("",), (), {"both": ("gate", "up")}))
    wanted = [[0.0, 1], [6, 7], [2, 3], [8, 9], [4, 5], [10, 11]]
    assert module.mlp.both.weight.tolist() == wanted


def test_whole_paths_may_be_packed(tmp_path: Path) -> None:
    packed = {"self_attn.qkv_proj": tuple(f"self_attn.{part}_proj" for part in "qkv")}
    model, other = Model(), Model()
    files = files_of(tmp_path, checkpoint())
    load(model, files)
    load(other, files, WeightMap(("model.",), (), packed))
    assert torch.equal(
        model.layers[1].self_attn.qkv_proj.weight, other.layers[1].self_attn.qkv_proj.weight
    )


def test_target_draft_and_skip_cover_a_multimodal_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vision = {f"model.visual.blocks.{i}.weight": torch.zeros(1) for i in range(3)}
    head = {"lm_head.weight": torch.randn(5, 4)}
    target = checkpoint("model.language_model.")
    files = files_of(tmp_path, {**target, **head, **mtp_tensors(), **vision})
    model, draft = Model(tied=False), Draft()
    reports = [
        load_weights(model, files, TARGET_MAP, torch.float32, "cpu"),
        load_weights(draft, files, DRAFT_MAP, torch.float32, "cpu"),
    ]
    assert torch.equal(model.lm_head.weight, head["lm_head.weight"])
    assert torch.equal(draft.fc.weight, torch.ones(4, 8))
    with caplog.at_level(logging.INFO, "outrider"):
        check_coverage(files, reports)
        check_coverage(files, reports[:1])
    both, alone = [record.getMessage() for record in caplog.records]
    assert "16 tensors loaded, 3 skipped (model.visual: 3), 0 of an unused draft" in both
    assert "11 tensors loaded" in alone and "5 of an unused draft left out (mtp." in alone


def test_tensors_that_nobody_used_are_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, {**checkpoint(), "audio.weight": torch.zeros(1)})
    report = load_weights(Model(), files, TARGET_MAP, torch.float32, "cpu")
    with pytest.raises(CheckpointError, match=r"unexpected tensors: audio\.weight"):
        check_coverage(files, [report])


def test_parameters_are_cast_except_those_that_keep_their_type(tmp_path: Path) -> None:
    model = Model()
    files = files_of(tmp_path, {n: t.half() for n, t in checkpoint().items()})
    load_weights(model, files, TARGET_MAP, torch.bfloat16, "cpu")
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert types.pop("layers.0.A_log") == types.pop("layers.1.A_log") == torch.float32
    assert set(types.values()) == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_module_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    reference = Model()
    files = files_of(tmp_path, checkpoint())
    load(model, files)
    load(reference, files)
    for (name, got), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(got, wanted), name
    assert model.layers[0].A_log.keep_dtype


def test_loaded_values_do_not_alias_the_file(tmp_path: Path) -> None:
    files = files_of(tmp_path, checkpoint())
    model = Model()
    load(model, files)
    model.norm.weight.data.fill_(9)
    assert torch.equal(files.get("model.norm.weight"), torch.arange(4.0))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["model.layers.1.self_attn.k_proj.weight"], tensors["model.norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        load(Model(), files_of(tmp_path, tensors))
    assert "missing tensors: layers.1.self_attn.k_proj.weight, norm.weight" in str(caught.value)


def test_a_model_without_tied_head_needs_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        load(Model(tied=False), files_of(tmp_path, checkpoint()))


def test_unexpected_tensors_are_named_up_to_eight_and_counted(tmp_path: Path) -> None:
    extra = {f"model.extra.{i:02}": torch.zeros(1) for i in range(11)}
    with pytest.raises(CheckpointError) as caught:
        load(Model(), files_of(tmp_path, {**checkpoint(), **extra}))
    text = str(caught.value)
    assert "unexpected tensors: model.extra.00" in text
    assert "model.extra.07 and 3 more" in text and "model.extra.08" not in text


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.norm.weight", (5,), r"shape \[5\], wanted \[4\] for norm.weight"),
        ("model.norm.weight", (4, 1), r"shape \[4, 1\], wanted \[4\]"),
        ("model.embed_tokens.weight", (6, 4), r"shape \[6, 4\], wanted \[5, 4\]"),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (3, 4),
            r"shape \[3, 4\], wanted \[2, 4\] for layers.0.self_attn.qkv_proj.weight",
        ),
        ("model.layers.0.self_attn.q_proj.weight", (6, 3), r"shape \[6, 3\], wanted \[6, 4\]"),
    ],
)
def test_a_wrong_shape_names_the_tensor_and_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...], wanted: str
) -> None:
    files = files_of(tmp_path, {**checkpoint(), name: torch.zeros(shape)})
    with pytest.raises(CheckpointError, match=f"{name}: {wanted}"):
        load(Model(), files)


def test_parts_whose_sizes_are_swapped_do_not_pass_for_each_other(tmp_path: Path) -> None:
    tensors = checkpoint()
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    tensors[q], tensors[k] = tensors[k], tensors[q]
    with pytest.raises(CheckpointError, match=r"q_proj.*k_proj|k_proj.*q_proj"):
        load(Model(), files_of(tmp_path, tensors))


def test_all_kinds_of_problem_are_told_at_once(tmp_path: Path) -> None:
    tensors = {**checkpoint(), "model.x": torch.zeros(1), "model.norm.weight": torch.zeros(1)}
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"wrong .*norm.*missing .*embed.*unexpected .*x"):
        load(Model(), files_of(tmp_path, tensors))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_tensors_are_not_taken_for_plain_ones(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {**checkpoint(), "model.norm.weight": torch.zeros(4).to(dtype)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: torch\..*not built yet"):
        load(Model(), files_of(tmp_path, tensors))


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path) -> None:
    tensors = {**checkpoint(), "model.language_model.norm.weight": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"both fill norm\.weight"):
        load(Model(), files_of(tmp_path, tensors))


def test_a_tied_head_in_the_file_is_left_out_if_it_equals_the_embedding(tmp_path: Path) -> None:
    tensors = checkpoint()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    files = files_of(tmp_path, tensors)
    report = load_weights(Model(), files, TARGET_MAP, torch.float32, "cpu")
    assert report.skipped == {"lm_head.weight"}
    check_coverage(files, [report])


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    files = files_of(tmp_path, {**checkpoint(), "lm_head.weight": torch.ones(5, 4)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load(Model(), files)


# Parameters without a checkpoint.


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    models = [Model(), Model(tied=False), Model()]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        dummy_weights(model, seed)
    first, untied, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], untied[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["layers.0.A_log"], first["layers.1.A_log"])


def test_dummy_weights_are_small_and_norms_near_neutral() -> None:
    model = Model()
    model.embed_tokens = nn.Embedding(500, 40)
    dummy_weights(model, 0)
    assert 0.019 < model.embed_tokens.weight.std().item() < 0.021
    assert (model.norm.weight - 1).abs().max() < 0.2


def test_prepared_parameters_keep_marks_and_sharing() -> None:
    with torch.device("meta"):
        model = Model(tied=False)
    model.lm_head.weight = model.embed_tokens.weight
    prepare_parameters(model, torch.float16, "cpu")
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.embed_tokens.weight.dtype == torch.float16
    assert model.layers[0].A_log.dtype == torch.float32
    assert model.norm.weight.dummy_init == "ones"
    dummy_weights(model, 0)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
