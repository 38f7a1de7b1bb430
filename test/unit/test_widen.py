"""The demo pair widened to a middle shape: the same logits, the same text, the same acceptance, from parts or whole."""

from __future__ import annotations

import pytest
import torch
import typer
from support.engines import engine, greedy
from support.prompts import PROMPTS

from benchmark.widen import verify
from benchmark.widen.draft import feature_slots
from benchmark.widen.folders import open_folder, wide_model, write_folders
from benchmark.widen.loader import GeneratedLoader
from benchmark.widen.padding import load_padding
from benchmark.widen.rules import Replicas, grouped_heads, partition, sources, tile, turns
from benchmark.widen.shapes import WIDENINGS, SmallPair
from benchmark.widen.target import wide_target
from benchmark.widen.tensors import FAINT

CPU = torch.device("cpu")
MID, REAL = WIDENINGS["mid"], WIDENINGS["27b"]


@pytest.fixture(scope="module")
def pair():
    return SmallPair.load()


@pytest.mark.parametrize("n", range(1, 65))
def test_partitions_sum_to_one_in_bf16(n):
    shares = torch.tensor(partition(n), dtype=torch.bfloat16)
    assert len(shares) == n and bool((shares > 0).all())
    assert bool((shares.float().frexp().mantissa == 0.5).all()), "a share is no power of two"
    total = torch.zeros((), dtype=torch.bfloat16)
    for share in sorted(shares):
        total += share
    assert total.item() == 1.0
    assert n <= 2 or len(set(shares.tolist())) > 1


def test_turns_depend_on_place_alone_and_take_every_value():
    rows, columns = torch.arange(100, 400), torch.arange(256)
    found = turns(7, rows, columns, 20)
    assert torch.equal(found[50:60, 3:9], turns(7, rows[50:60], columns[3:9], 20))
    counts = found.flatten().bincount(minlength=20)
    # 76,800 draws: each value comes 3,840 times, give or take 60 (one standard deviation).
    assert (counts - 3840).abs().max() < 400
    assert not torch.equal(found, turns(8, rows, columns, 20))


def test_query_heads_read_the_replica_of_their_own_kv_head():
    heads, kv = grouped_heads(4, 2, 32, 8, CPU)
    for wide in range(32):
        assert kv.small[wide // 4] == heads.small[wide] // 2
    assert heads.count == 8 and kv.count == 4
    assert not heads.tiled, "this is the layout that is no plain tiling"


def test_replicas_are_numbered_whatever_their_order():
    small = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3])
    replicas = Replicas(small)
    assert sorted(replicas.place.tolist()) == list(range(16)) and bool((replicas.place % 4 == small).all())
    assert Replicas(torch.arange(12) % 4).tiled


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tile("hidden", 256, 5100, CPU), "hidden: 5100 is not a multiple of the small pair's 256"),
        (lambda: grouped_heads(4, 2, 24, 8, CPU), "heads: 3 per KV head are not a multiple"),
        (lambda: sources((0, 1, 2, 3, 7), 8, 4), "small layer 4 at 7 is of another type"),
        (lambda: Replicas(torch.tensor([0, 0, 1])), "uneven"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("widening", [MID, REAL], ids=["mid", "27b"])
def test_small_layers_stand_where_the_drafter_looks(pair, widening):
    found = sources(widening.placed, widening.target.layers, 4)
    assert [found[at] for at in widening.placed] == list(range(pair.target.layers))
    assert [pair.draft.target_layers[slot] for slot in feature_slots(pair, widening)] == [1, 3, 3, 5, 6]


def test_the_real_shape_has_the_parameters_of_the_published_one():
    """26.9 B and 1.73 B, by the shapes alone; nothing is made."""
    for role, expected in (("target", 26.9e9), ("draft", 1.73e9)):
        tensors = wide_model("27b", role, CPU).tensors.values()
        assert sum(torch.Size(t.shape).numel() for t in tensors) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_parts_equal_the_whole(role):
    """Ranges of rows and the shards of four ranks, along rows and along columns, of every matrix of some layers."""
    model = wide_model("mid", role, CPU)
    names = [n for n in model if n.count(".") < 4 or ".0." in n or ".3." in n]
    for name in names:
        whole = model[name]
        assert tuple(whole.shape) == model.tensors[name].shape and whole.dtype == torch.bfloat16
        rows = len(whole)
        ragged = [slice(0, 1), slice(1, rows // 3), slice(rows // 3, rows)]
        assert torch.equal(torch.cat([model.part(name, r) for r in ragged]), whole), name
        if rows % 4 == 0:
            shards = [slice(r * rows // 4, (r + 1) * rows // 4) for r in range(4)]
            assert torch.equal(torch.cat([model.part(name, s) for s in shards]), whole), name
        if whole.dim() == 2:
            shards = [slice(c * whole.shape[1] // 4, (c + 1) * whole.shape[1] // 4) for c in range(4)]
            assert torch.equal(torch.cat([model.part(name, columns=s) for s in shards], 1), whole), name


def test_rows_of_the_real_shape_sum_to_the_small_matrix(pair):
    """The last rows of a 17,408 x 5,120 matrix, and a few that read all 17,408 columns: exact in fp64, no zero."""
    model = wide_model("27b", "target", CPU)
    for name, rows, scale in (
        ("model.layers.63.mlp.gate_proj.weight", slice(17_400, 17_408), 1),
        ("model.layers.63.mlp.down_proj.weight", slice(5_112, 5_120), 1),
        ("model.layers.40.mlp.down_proj.weight", slice(0, 8), FAINT),
    ):
        small = pair.target_weights[name.replace("63", "7").replace("40", "5")].double()
        wide = model.part(name, rows).double()
        summed = wide.view(8, -1, small.shape[1]).sum(1)
        wanted = small[torch.arange(model.tensors[name].shape[0])[rows] % len(small)]
        assert torch.equal(summed, wanted * scale), name
        assert (
            bool((wide != 0).any(1).all()) and len(set(wide[0].view(-1, small.shape[1])[:, 0].tolist())) > 1
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_drafts_stay_the_small_pairs(dtype, capsys):
    """The bounds stand in `verify`: fp32 within 1e-3 with every best token equal, bf16 within its own rounding."""
    verify.main("mid", None, 2, 48, dtype, "cpu")
    said = capsys.readouterr().out
    assert "target: 96 positions" in said and "drafter: 150 positions" in said


def test_padding_of_another_pair_is_refused(pair):
    other = SmallPair(pair.target, pair.draft, pair.target_weights, dict(pair.draft_weights))
    other.draft_weights["norm.weight"] = other.draft_weights["norm.weight"] + 1
    with pytest.raises(ValueError, match="fitted for another pair.*benchmark.widen.fit_padding"):
        load_padding(other)


def test_verify_notices_a_wrong_weight(pair, monkeypatch):
    def with_a_flaw(shape, role, device):
        model = wide_model(shape, role, device)
        if role == "target":
            copied = model.tensors["model.layers.2.input_layernorm.weight"]
            copied.rows = copied.rows.roll(1)
        return model

    monkeypatch.setattr(verify, "wide_model", with_a_flaw)
    with pytest.raises(typer.Exit):
        verify.main("mid", None, 1, 32, "float32", "cpu")


def test_verify_notices_padding_that_is_too_near(monkeypatch, pair):
    def near(shape, role, device):
        if role == "draft":
            return wide_model(shape, role, device)
        return wide_target(pair, WIDENINGS[shape], load_padding(pair) / 64)

    monkeypatch.setattr(verify, "wide_model", near)
    with pytest.raises(typer.Exit):
        verify.main("mid", None, 1, 32, "float32", "cpu")


@pytest.mark.slow
def test_engine_serves_the_same_text_with_the_same_acceptance(tmp_path):
    """Both pairs served with trees of budget 15: equal texts, and equally many steps for each of them."""
    target, draft = write_folders("mid", tmp_path)
    found = []
    for wide in (False, True):
        folders = dict(target=str(target), draft=str(draft), load_format=GeneratedLoader) if wide else {}
        with engine(15, disable_radix_cache=True, **folders) as running:
            found.append(running.generate(PROMPTS[:4], greedy(40)))
    small, wide = found
    assert [o["output_ids"] for o in wide] == [o["output_ids"] for o in small]
    assert [o["meta_info"]["spec_verify_ct"] for o in wide] == [
        o["meta_info"]["spec_verify_ct"] for o in small
    ]


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="widen.json is missing; make the folder with"):
        open_folder(tmp_path, CPU)


def test_server_info_can_show_the_load_format():
    from fastapi.encoders import jsonable_encoder

    assert jsonable_encoder(dict(load_format=GeneratedLoader)) == {
        "load_format": {"loader": "GeneratedLoader"}
    }
